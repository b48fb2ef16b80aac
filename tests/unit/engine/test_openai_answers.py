"""What is done to the deltas before SGLang formats them, and to its tool calls afterwards."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inferbus.workers.engine.interface import Delta, Finish
from inferbus.workers.engine.sglang.answers import _with_text
from inferbus.workers.engine.sglang.toolcalls import SentCalls

STEPS = st.lists(st.tuples(st.integers(0, 2), st.sampled_from(["", "", "a", "bc"])), max_size=30)


async def stream(deltas: list[Delta]) -> AsyncIterator[Delta]:
    """The deltas, one after the other."""
    for delta in deltas:
        yield delta


def delta(index: int, number: int, text: str, finish: Finish | None = None) -> Delta:
    """A delta of one token with its log probability."""
    meta = {"completion_tokens": number, "output_token_logprobs": [(-0.5, number, None)]}
    return Delta(index=index, token_ids=[number], text=text, finish=finish, meta=meta)


@given(STEPS)
async def test_tokens_without_text_come_with_the_next_that_have_some(steps: list[tuple[int, str]]) -> None:
    given_ = [delta(index, number, text) for number, (index, text) in enumerate(steps)]
    given_ += [delta(index, 100 + index, "", Finish(reason="length")) for index in range(3)]
    joined = [each async for each in _with_text(stream(given_))]
    assert all(each.text or each.finish for each in joined)
    for index in range(3):
        mine = [each for each in joined if each.index == index]
        theirs = [each for each in given_ if each.index == index]
        assert [t for each in mine for t in each.token_ids] == [t for each in theirs for t in each.token_ids]
        assert "".join(each.text for each in mine) == "".join(each.text for each in theirs)
        assert [row for each in mine for row in each.meta["output_token_logprobs"]] == [
            row for each in theirs for row in each.meta["output_token_logprobs"]
        ]
        assert mine[-1].finish is not None


def chunk(reason: str | None = None, **delta_: Any) -> dict[str, Any]:
    """A streamed chat chunk."""
    return {"choices": [{"index": 0, "delta": delta_, "finish_reason": reason}]}


def call(arguments: str, name: str | None = None) -> list[dict[str, Any]]:
    """A part of a call."""
    return [{"index": 0, "id": name and "call_1", "function": {"name": name, "arguments": arguments}}]


@pytest.mark.parametrize(
    ("finish", "arguments", "reason"),
    [
        (Finish(reason="stop", matched="END"), '{"a": "b', "stop"),
        (Finish(reason="stop", matched="END"), '{"a": "b"}', "tool_calls"),
        (Finish(reason="length"), '{"a": "b', "length"),
        (Finish(reason="stop", matched=2), '{"a": "b"}', "tool_calls"),
    ],
)
def test_the_finish_reason_is_tool_calls_only_for_complete_calls(
    finish: Finish, arguments: str, reason: str
) -> None:
    calls = SentCalls()
    calls.read(chunk(content="Well."))
    calls.read(chunk(tool_calls=call("", "look")))
    calls.read(chunk(tool_calls=call(arguments)))
    calls.end(0, finish)
    last = chunk("tool_calls" if finish.reason == "stop" else "length")
    last["choices"][0]["matched_stop"] = finish.matched
    calls.read(last)
    assert last["choices"][0]["finish_reason"] == reason
    body = {
        "choices": [
            {
                "index": 0,
                "message": {"content": "x", "tool_calls": None},
                "finish_reason": "stop",
                "matched_stop": None,
            }
        ]
    }
    choice = json.loads(calls.completed(json.dumps(body).encode()))["choices"][0]
    assert choice["message"]["content"] == "Well."
    assert (choice["finish_reason"], choice["matched_stop"]) == (reason, finish.matched)
    (told,) = choice["message"]["tool_calls"]
    assert (told["id"], told["function"]) == ("call_1", {"name": "look", "arguments": arguments})


@given(STEPS)
async def test_choice_0_has_the_first_chunk(steps: list[tuple[int, str]]) -> None:
    """openai's own stream helper fails otherwise."""
    given_ = [delta(index, number, text) for number, (index, text) in enumerate(steps)]
    given_ += [delta(index, 100 + index, "", Finish(reason="length")) for index in (2, 1, 0)]
    joined = [each async for each in _with_text(stream(given_))]
    assert joined[0].index == 0
