"""Streamed text: whole characters, no stop string in part, the same as in one piece.

A grammar makes the random model say what a test needs; how it is cut into tokens is up to the seed.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from inferbus.schemas.requests import parse
from inferbus.workers.engine.interface import Delta
from tests.support.engine_suite import ids, rid
from tests.support.remote_engine import RemoteEngine

SCRIPTS = "ď🏳️‍🌈世 é漢字 😀"


@pytest.fixture(scope="module")
def vocabulary(model: str) -> dict[str, int]:
    """Ids by token."""
    tokens: dict[str, int] = json.loads(Path(model, "tokenizer.json").read_text())["model"]["vocab"]
    return tokens


async def said(engine: RemoteEngine, regex: str, **fields: Any) -> list[Delta]:
    """The deltas of a completion that has to match."""
    body = {"prompt": "x", "regex": regex, "max_tokens": 120, "temperature": 1} | fields
    prompt = await engine.prepare(parse("completions", body))
    return [delta async for delta in engine.generate(prompt.leg(0, rid=rid()))]


def text(deltas: list[Delta]) -> str:
    """What they say together."""
    return "".join(delta.text for delta in deltas)


@pytest.mark.parametrize("seed", range(4))
async def test_characters_of_many_tokens_come_whole(engine: RemoteEngine, seed: int) -> None:
    deltas = await said(engine, SCRIPTS, seed=seed)
    assert text(deltas) == SCRIPTS
    assert not any("�" in delta.text for delta in deltas)
    assert len(ids(deltas)) > len(SCRIPTS)


async def test_a_replacement_character_that_the_model_means_comes_through(engine: RemoteEngine) -> None:
    assert text(await said(engine, "prefix � after")) == "prefix � after"


@pytest.mark.parametrize("max_tokens", range(1, 9))
async def test_a_stream_cut_inside_a_character_ends_as_the_whole_answer_does(
    engine: RemoteEngine, max_tokens: int
) -> None:
    body = {"prompt": "x", "regex": "😀🏳️‍🌈世", "max_tokens": max_tokens, "temperature": 0}
    prompt = await engine.prepare(parse("completions", body))
    answer = prompt.answer()
    told = ""
    async for chunk in answer.chunks(engine.generate(prompt.leg(0, rid=rid()))):
        assert isinstance(chunk, bytes)
        told += json.loads(chunk)["choices"][0]["text"]
    whole = answer.whole()
    assert isinstance(whole, bytes)
    assert json.loads(whole)["choices"][0]["text"] == told
    sampling = {"temperature": 0, "regex": "😀🏳️‍🌈世", "max_new_tokens": max_tokens}
    once = await engine.bare_text(input_ids=prompt.token_ids, sampling_params=sampling)
    assert told.rstrip("�") == once.rstrip("�")
    assert told.count("�") <= 1


@pytest.mark.parametrize("stop", ["DEFGHIJ", "EFG", "P", "ABCD"])
@pytest.mark.parametrize("seed", range(3))
async def test_nothing_of_a_stop_string_is_sent(engine: RemoteEngine, stop: str, seed: int) -> None:
    alphabet = "ABCDEFGHIJKLMNOP"
    deltas = await said(engine, alphabet, stop=stop, seed=seed)
    assert text(deltas) == alphabet.partition(stop)[0]
    assert deltas[-1].finish is not None
    assert (deltas[-1].finish.reason, deltas[-1].finish.matched) == ("stop", stop)


@pytest.mark.parametrize("stop", ["DEFGHIJ", "MNOP"])
async def test_a_stop_string_said_letter_by_letter_is_seen(
    engine: RemoteEngine, vocabulary: dict[str, int], stop: str
) -> None:
    """SGLang looks at as many tokens as the string has when it is tokenised as a whole, and misses it."""
    alphabet = "ABCDEFGHIJKLMNOP"
    pieces = {alphabet[i:j] for i in range(16) for j in range(i + 2, 17)}
    banned = {str(vocabulary[piece]): -100 for piece in pieces & vocabulary.keys()}
    deltas = await said(engine, alphabet, stop=stop, logit_bias=banned)
    assert text(deltas) == alphabet.partition(stop)[0]
    assert deltas[-1].finish is not None
    assert (deltas[-1].finish.reason, deltas[-1].finish.matched) == ("stop", stop)
    assert len(ids(deltas)) >= alphabet.index(stop) + len(stop)


async def test_a_stop_string_that_is_asked_for_is_kept_in_both_ways(engine: RemoteEngine) -> None:
    body = {
        "prompt": "x",
        "regex": "ABCDEFGHIJKLMNOP",
        "max_tokens": 60,
        "stop": "EFG",
        "include_stop_str_in_output": True,
    }
    prompt = await engine.prepare(parse("completions", body))
    answer = prompt.answer()
    told = ""
    async for chunk in answer.chunks(engine.generate(prompt.leg(0, rid=rid()))):
        assert isinstance(chunk, bytes)
        told += json.loads(chunk)["choices"][0]["text"]
    whole = answer.whole()
    assert isinstance(whole, bytes)
    assert json.loads(whole)["choices"][0]["text"] == told
    assert "EFG" in told


async def test_a_json_schema_is_kept_to(engine: RemoteEngine) -> None:
    schema = {
        "type": "object",
        "properties": {"answer": {"type": "integer", "maximum": 9, "minimum": 0}},
        "required": ["answer"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    body = {"messages": [{"role": "user", "content": "A digit?"}], "response_format": form, "max_tokens": 100}
    prompt = await engine.prepare(parse("chat", body))
    answer = prompt.answer()
    async for _ in answer.chunks(engine.generate(prompt.leg(0, rid=rid()))):
        pass
    whole = answer.whole()
    assert isinstance(whole, bytes)
    choice = json.loads(whole)["choices"][0]
    if choice["finish_reason"] == "stop":
        assert json.loads(choice["message"]["content"])["answer"] in range(10)
    else:
        assert choice["message"]["content"].lstrip().startswith("{")
