"""An engine without a tokenizer; and, at the end, the death of its scheduler."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import Any

import pytest

from inferbus.schemas.errors import NotSupported
from inferbus.schemas.requests import parse
from inferbus.schemas.subjects import Kind
from inferbus.workers.engine.sglang.launch import ENGINE_DIED
from tests.support.engine_suite import answered, ids, leg_of
from tests.support.eventually import eventually
from tests.support.remote_engine import RemoteEngine


async def test_it_serves_tokens_alone(tokens_only: RemoteEngine) -> None:
    assert tokens_only.info.kinds == ("tokens",)
    assert not tokens_only.info.tokenizer


async def test_it_gives_the_tokens_that_an_engine_with_a_tokenizer_gives(
    engine: RemoteEngine, tokens_only: RemoteEngine
) -> None:
    runs = [await leg_of(each, [9, 8, 7], max_new_tokens=20) for each in (engine, tokens_only)]
    assert ids(runs[0]) == ids(runs[1])


async def test_it_gives_log_probabilities(tokens_only: RemoteEngine) -> None:
    _, whole = await answered(tokens_only, "tokens", logprobs=True, top_logprobs=2, max_tokens=4)
    assert len(whole.choices[0].logprobs.logprobs) == 4


@pytest.mark.parametrize(
    "fields",
    [
        {"stop": "x"},
        {"stop": ["x"]},
        {"stop_regex": "x+"},
        {"min_tokens": 2},
        {"json_schema": "{}"},
        {"regex": "a"},
        {"ebnf": 'root ::= "a"'},
        {"structural_tag": "{}"},
    ],
    ids=str,
)
async def test_what_needs_a_tokenizer_is_refused_and_never_ignored(
    tokens_only: RemoteEngine, fields: dict[str, Any]
) -> None:
    with pytest.raises(NotSupported) as caught:
        await tokens_only.prepare(parse("tokens", {"token_ids": [1, 2]} | fields))
    assert caught.value.param


@pytest.mark.parametrize(
    ("kind", "body"),
    [("chat", {"messages": [{"role": "user", "content": "x"}]}), ("completions", {"prompt": "x"})],
)
async def test_text_is_refused(tokens_only: RemoteEngine, kind: Kind, body: dict[str, Any]) -> None:
    with pytest.raises(NotSupported):
        await tokens_only.prepare(parse(kind, body))


async def test_signals_reach_the_program_and_not_the_engine(tokens_only: RemoteEngine) -> None:
    assert await leg_of(tokens_only, [1, 2], max_new_tokens=2)
    for pid in (*tokens_only.children, tokens_only.pid):
        os.kill(pid, signal.SIGTERM)
    for pid in tokens_only.children:
        os.kill(pid, signal.SIGINT)
    await eventually(tokens_only.terms, what="SIGTERM did not reach the program's own handler")
    assert await leg_of(tokens_only, [1, 2], max_new_tokens=2)
    assert await tokens_only.healthy(fresh=0)


async def test_the_death_of_the_scheduler_ends_the_process_and_leaves_nothing(
    tokens_only: RemoteEngine,
) -> None:
    if tokens_only.process is None:
        pytest.skip("the engine belongs to an earlier test run")
    running = asyncio.ensure_future(leg_of(tokens_only, [1, 2], max_new_tokens=3000))

    async def generating() -> bool:
        return (await tokens_only.load()).running > 0

    await eventually(generating, what="a request under way")
    os.kill(tokens_only.children[0], signal.SIGKILL)
    code = await asyncio.to_thread(tokens_only.process.wait, 30)
    assert code == ENGINE_DIED
    with pytest.raises(EOFError):
        await running
    for pid in tokens_only.children:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
