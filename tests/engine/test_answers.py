"""A stream and the whole answer of the same tokens say the same."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from inferbus.schemas.requests import parse
from inferbus.schemas.subjects import Kind
from inferbus.workers.engine.interface import Prompt
from tests.engine.test_pair import through_pair
from tests.support.engine_suite import legs
from tests.support.remote_engine import RemoteEngine

SCRIPTS = "ď🏳️‍🌈世 é漢字 😀 人工智能是计算机"
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
CALL = '<tool_call>\n{"name": "look", "arguments": {"at": "Paris, not Rome", "when": "now"}}\n</tool_call>'
BODIES: dict[Kind, dict[str, Any]] = {
    "chat": {"messages": [{"role": "user", "content": "Where?"}]},
    "completions": {"prompt": "x"},
}


async def prepared(engine: RemoteEngine, kind: Kind, text: str, **fields: Any) -> Prompt:
    """A request whose answer has to be this text."""
    regex = re.sub(r"([{}.])", r"[\1]", text)
    body = BODIES[kind] | {"regex": regex, "max_tokens": 200, "temperature": 1, "seed": 1} | fields
    return await engine.prepare(parse(kind, body))


async def both_ways(prompt: Prompt, deltas: Any) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The streamed choices, and the only choice of the whole answer."""
    answer = prompt.answer()
    chunks = [json.loads(chunk) async for chunk in answer.chunks(deltas) if isinstance(chunk, bytes)]
    whole = answer.whole()
    assert isinstance(whole, bytes)
    return [choice for chunk in chunks for choice in chunk["choices"]], json.loads(whole)["choices"][0]


def told(choices: list[dict[str, Any]]) -> tuple[str | None, list[tuple[str, str]], str]:
    """Content, calls and finish reason of a streamed chat."""
    content = ""
    calls: dict[int, list[str]] = {}
    for choice in choices:
        content += choice["delta"].get("content") or ""
        for part in choice["delta"].get("tool_calls") or ():
            call = calls.setdefault(part["index"], ["", ""])
            call[0] += part["function"].get("name") or ""
            call[1] += part["function"].get("arguments") or ""
    reason = next(choice["finish_reason"] for choice in choices if choice["finish_reason"])
    return content or None, [(name, arguments) for name, arguments in calls.values()], reason


def said(choice: dict[str, Any]) -> tuple[str | None, list[tuple[str, str]], str]:
    """The same of a whole answer."""
    message = choice["message"]
    functions = [call["function"] for call in message.get("tool_calls") or ()]
    calls = [(function["name"], function["arguments"]) for function in functions]
    return message["content"] or None, calls, choice["finish_reason"]


@pytest.mark.parametrize("paired", [False, True], ids=["both", "pair"])
async def test_a_completion_sends_no_chunk_without_text(
    engine: RemoteEngine, prefill: RemoteEngine, decode: RemoteEngine, paired: bool
) -> None:
    prompt = await prepared(decode if paired else engine, "completions", SCRIPTS)
    deltas = through_pair(prefill, decode, prompt) if paired else legs(engine, prompt)
    streamed, whole = await both_ways(prompt, deltas)
    assert all(choice["text"] or choice["finish_reason"] for choice in streamed)
    assert "".join(choice["text"] for choice in streamed) == whole["text"] == SCRIPTS


@pytest.mark.parametrize("kind", ["chat", "completions"])
@pytest.mark.parametrize("paired", [False, True], ids=["parser", "plain"])
async def test_a_stream_has_the_log_probability_of_every_token(
    engine: RemoteEngine, prefill: RemoteEngine, decode: RemoteEngine, paired: bool, kind: Kind
) -> None:
    """The aggregated engine has found a tool parser, the pair has none: SGLang treats them differently."""
    fields = {"logprobs": True, "top_logprobs": 2} if kind == "chat" else {"logprobs": 2}
    prompt = await prepared(decode if paired else engine, kind, SCRIPTS, **fields)
    deltas = through_pair(prefill, decode, prompt) if paired else legs(engine, prompt)
    streamed, whole = await both_ways(prompt, deltas)
    name = "content" if kind == "chat" else "tokens"
    entries = [entry for choice in streamed for entry in (choice.get("logprobs") or {}).get(name) or ()]
    assert entries == whole["logprobs"][name]
    assert len(entries) > len(SCRIPTS)


@pytest.mark.parametrize("behind", ["", "\nAnd that is all."])
async def test_a_complete_tool_call_and_the_text_around_it_are_the_same_in_both(
    engine: RemoteEngine, behind: str
) -> None:
    prompt = await prepared(engine, "chat", "Well. " + CALL + behind, tools=[TOOL])
    streamed, whole = await both_ways(prompt, legs(engine, prompt))
    content, calls, reason = said(whole)
    assert told(streamed) == said(whole)
    assert (content or "").startswith("Well.")
    assert [(name, json.loads(arguments)) for name, arguments in calls] == [
        ("look", {"at": "Paris, not Rome", "when": "now"})
    ]
    assert reason == "tool_calls"


@pytest.mark.parametrize(
    "fields",
    [{"stop": "not Rome"}, {"stop": "Rome", "no_stop_trim": True}, {"stop": "when"}]
    + [{"max_tokens": length} for length in (12, 20, 30, 40)],
    ids=str,
)
async def test_a_call_that_was_cut_off_is_as_far_as_it_came_in_both(
    engine: RemoteEngine, fields: dict[str, Any]
) -> None:
    prompt = await prepared(engine, "chat", CALL, tools=[TOOL], **fields)
    streamed, whole = await both_ways(prompt, legs(engine, prompt))
    _, calls, reason = said(whole)
    assert told(streamed) == said(whole)
    assert reason == ("stop" if "stop" in fields else "length")
    for _, arguments in calls:
        assert '{"at": "Paris, not Rome", "when": "now"}'.startswith(arguments)
