"""Chunks that are too large for one message: cut, and still the same answer."""

from __future__ import annotations

import datetime as dt
from itertools import chain
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from inferbus.schemas import headers
from inferbus.schemas.answers import TokenChunk, TokenLogprobs, TopLogprob, Usage
from inferbus.schemas.errors import PayloadTooLarge
from inferbus.workers.client.messages import ChunkMessage, parse_message
from inferbus.workers.jobs.attempt import Attempt
from inferbus.workers.jobs.reply import Reply, Served
from inferbus.workers.jobs.split import halves
from tests.support.memory import BoundedBroker

USAGE = Usage(prompt_tokens=1, completion_tokens=2, total_tokens=3)


def sent(
    chunk: msgspec.Struct | bytes, *, submission: int | None = None, **extra: Any
) -> list[dict[str, Any]]:
    """The chunks that a reply made of one."""
    attempt = Attempt(
        job="j",
        owner="acme",
        model="m",
        kind="chat",
        number=1,
        job_class=None,
        submission=submission,
        arrived=dt.datetime.now(dt.UTC),
        reply="_INBOX.x",
    )
    broker = BoundedBroker()
    reply = Reply(broker, attempt, Served(worker="w"))
    reply.chunk(chunk, extra)
    reply.end("ok")
    *chunks, end = broker.sent
    assert end.headers[headers.CHUNKS] == str(len(chunks))
    found = [msgspec.json.decode(message.data) for message in chunks]
    assert [each["seq"] for each in found] == list(range(len(chunks)))
    return found


def openai(choice: dict[str, Any], **more: Any) -> bytes:
    return msgspec.json.encode({"id": "c", "choices": [{"index": 0, **choice}], **more})


@pytest.mark.parametrize("submission", [None, 7])
def test_a_long_text_of_a_chat_goes_out_in_several_chunks(submission: int | None) -> None:
    text = "模型\U0001f600 text " * 3_000
    logprobs = {"content": [{"token": "a", "logprob": -0.5, "bytes": [97]}] * 2_000}
    delta = {"role": "assistant", "content": text}
    chunk = openai({"delta": delta, "logprobs": logprobs, "finish_reason": "stop"}, usage={"total_tokens": 3})
    parts = sent(chunk, submission=submission, token_ids=[1, 2], warnings=["w"])
    choices = [part["choices"][0] for part in parts]
    assert len(parts) > 1
    assert "".join(choice["delta"]["content"] for choice in choices) == text
    assert list(chain(*(choice["logprobs"]["content"] for choice in choices))) == logprobs["content"]
    assert [choice["finish_reason"] for choice in choices] == [None] * (len(parts) - 1) + ["stop"]
    assert [part for part in parts if "usage" in part] == parts[-1:]
    assert [part.get("token_ids") for part in parts] == [None] * (len(parts) - 1) + [[1, 2]]
    assert [part.get("warnings") for part in parts] == [["w"]] + [None] * (len(parts) - 1)


def test_a_long_text_of_a_completion_goes_out_in_several_chunks() -> None:
    names = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
    logprobs = {name: list(range(3_000)) for name in names}
    parts = sent(openai({"text": "x" * 20_000, "logprobs": logprobs, "finish_reason": None}))
    assert "".join(part["choices"][0]["text"] for part in parts) == "x" * 20_000
    for name in names:
        assert list(chain(*(part["choices"][0]["logprobs"][name] for part in parts))) == logprobs[name]


def test_the_tokens_of_a_completion_go_out_once_however_it_is_cut() -> None:
    """`return_token_ids` puts those of the answer into each chunk, and the prompt's into the first."""
    choice = {
        "text": "x" * 9_000,
        "token_ids": list(range(900)),
        "prompt_token_ids": list(range(9_000)),
        "finish_reason": "length",
    }
    parts = [part["choices"][0] for part in sent(openai(choice))]
    assert len(parts) > 1
    for name in ("token_ids", "prompt_token_ids"):
        assert list(chain(*(part[name] for part in parts))) == choice[name]


def test_long_arguments_of_a_tool_call_go_out_in_several_chunks() -> None:
    call = {"id": "t", "index": 0, "type": "function", "function": {"name": "f", "arguments": "y" * 30_000}}
    parts = sent(openai({"delta": {"tool_calls": [call]}, "finish_reason": "tool_calls"}))
    calls = [part["choices"][0]["delta"]["tool_calls"][0] for part in parts]
    assert "".join(each["function"]["arguments"] for each in calls) == "y" * 30_000
    assert [each.get("id") for each in calls] == ["t"] + [None] * (len(parts) - 1)


@given(st.lists(st.integers(0, 2**31 - 1), min_size=2, max_size=50), st.booleans())
def test_tokens_and_their_log_probabilities_stay_together(token_ids: list[int], alternatives: bool) -> None:
    top = [[TopLogprob(-1.0, token)] for token in token_ids] if alternatives else None
    logprobs = TokenLogprobs(logprobs=[float(token) for token in token_ids], top=top)
    chunk = TokenChunk(
        job="j",
        attempt=1,
        seq=0,
        index=0,
        token_ids=token_ids,
        logprobs=logprobs,
        finish_reason="length",
        usage=USAGE,
        warnings=["w"],
    )
    cut = halves(chunk)
    assert cut is not None
    first, second = cut
    assert isinstance(first, TokenChunk)
    assert isinstance(second, TokenChunk)
    assert first.token_ids + second.token_ids == token_ids
    for part in (first, second):
        assert part.logprobs is not None
        assert part.logprobs.logprobs == [float(token) for token in part.token_ids]
        assert part.logprobs.top == (
            [[TopLogprob(-1.0, token)] for token in part.token_ids] if alternatives else None
        )
    assert (first.finish_reason, first.usage, first.warnings) == (None, None, ["w"])
    assert (second.finish_reason, second.usage, second.warnings) == ("length", USAGE, [])


def test_what_cannot_be_cut_is_refused() -> None:
    with pytest.raises(PayloadTooLarge):
        sent(openai({"delta": {"content": "x"}, "odd": "x" * 20_000}))


def test_the_parts_of_a_chunk_are_chunks_to_a_client() -> None:
    for part in sent(openai({"delta": {"content": "x" * 20_000}, "finish_reason": "stop"})):
        assert isinstance(parse_message(msgspec.json.encode(part), {}), ChunkMessage)
