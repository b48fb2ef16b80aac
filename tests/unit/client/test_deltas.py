"""Putting chunks together, taking them apart, and leaving out what was shown."""

from __future__ import annotations

import itertools
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from inferbus.schemas.answers import TokenAnswer
from inferbus.workers.client.deltas import AnswerSoFar, Diverged, to_answer, to_chunks
from inferbus.workers.client.messages import Answer, Chunk
from tests.support.answers import USAGE, chat, chat_answer

TEXTS = st.text(max_size=8)
LOGPROBS = st.lists(st.fixed_dictionaries({"token": TEXTS, "logprob": st.just(-1.0)}), min_size=1, max_size=4)
CALLS = st.lists(
    st.fixed_dictionaries(
        {
            "id": st.uuids().map(str),
            "type": st.just("function"),
            "function": st.fixed_dictionaries({"name": st.just("f"), "arguments": TEXTS}),
        }
    ),
    min_size=1,
    max_size=2,
)


@st.composite
def chats(draw: st.DrawFn) -> Answer:
    answer = chat_answer("")
    answer["choices"] = []
    for index in range(draw(st.integers(1, 3))):
        message: dict[str, Any] = {"role": "assistant", "content": draw(st.none() | TEXTS)}
        if draw(st.booleans()):
            message["reasoning_content"] = draw(TEXTS)
        if draw(st.booleans()):
            message["tool_calls"] = draw(CALLS)
        choice = {
            "index": index,
            "message": message,
            "finish_reason": draw(st.sampled_from(["stop", "length"])),
        }
        if draw(st.booleans()):
            choice |= {"logprobs": {"content": draw(LOGPROBS)}, "matched_stop": draw(st.none() | TEXTS)}
        answer["choices"].append(choice)
    return answer


@st.composite
def completions(draw: st.DrawFn) -> Answer:
    choices = [
        {"index": index, "text": draw(TEXTS), "logprobs": None, "finish_reason": "stop", "matched_stop": 2}
        for index in range(draw(st.integers(1, 3)))
    ]
    fields = {
        "job": "j",
        "attempt": 1,
        "id": "cmpl-1",
        "object": "text_completion",
        "created": 1,
        "model": "m",
    }
    return {**fields, "choices": choices, "usage": USAGE}


@st.composite
def token_answers(draw: st.DrawFn) -> Answer:
    choices = []
    for index in range(draw(st.integers(1, 3))):
        ids = draw(st.lists(st.integers(0, 99), max_size=5))
        choice: dict[str, Any] = {"index": index, "token_ids": ids, "finish_reason": "length"}
        if draw(st.booleans()):
            choice["logprobs"] = {"logprobs": [-1.0] * len(ids), "top": [[[-1.0, 1], [-2.0, 2]]] * len(ids)}
        choices.append(choice)
    return msgspec.convert({"job": "j", "attempt": 1, "choices": choices, "usage": USAGE}, TokenAnswer)


ANSWERS = chats() | completions() | token_answers()


@given(ANSWERS)
def test_an_answer_taken_apart_and_put_together_is_the_same(answer: Answer) -> None:
    given_chunks = AnswerSoFar()
    for chunk in to_chunks(answer):
        given_chunks.add(chunk)
    assert to_answer(given_chunks) == answer


@given(ANSWERS, st.data())
def test_whatever_was_shown_of_an_answer_the_rest_completes_it(answer: Answer, data: st.DataObject) -> None:
    chunks = [piece for chunk in to_chunks(answer) for piece in cut(chunk, data)]
    shown = data.draw(st.integers(0, len(chunks)))
    got = AnswerSoFar()
    for chunk in chunks[:shown]:
        got.add(chunk)
    rest = got.prefix()
    for chunk in to_chunks(answer):
        left = rest.trim(chunk)
        if left is not None:
            got.add(left)
    assert rest.covered
    assert said(to_answer(got)) == said(answer)


def said(answer: Answer) -> Any:
    """An answer without what is empty in it: nothing can be said of that piece by piece."""
    plain = msgspec.to_builtins(answer)
    for choice in plain["choices"]:
        for node in (choice, choice.get("message", {})):
            for key in [key for key, value in node.items() if value in (None, "", [], {"content": None})]:
                del node[key]
    return plain


def cut(chunk: Chunk, data: st.DataObject) -> list[Chunk]:
    """A chunk with a content as two."""
    if not isinstance(chunk, dict) or not chunk["choices"]:
        return [chunk]
    [choice] = chunk["choices"]
    name = "text" if "text" in choice else "content"
    text = (choice.get("delta") or choice).get(name)
    if not text:
        return [chunk]
    at = data.draw(st.integers(0, len(text)))
    first, second = dict(choice), {"index": choice["index"], "finish_reason": None}
    if name == "text":
        first["text"] = text[:at]
        second |= {"text": text[at:], "logprobs": None}
    else:
        first["delta"] = choice["delta"] | {"content": text[:at]}
        second["delta"] = {"content": text[at:]}
    return [chunk | {"choices": [first]}, chunk | {"choices": [second]}]


@pytest.mark.parametrize(
    "deltas",
    [
        [{"content": "ab"}, {"content": "ac"}],
        [{"content": "ab"}, {"reasoning_content": "b"}, {"content": "b"}],
        [{"tool_calls": [{"function": {"name": "f"}}]}, {"tool_calls": [{"function": {"name": "g"}}]}],
        [{"tool_calls": [{"index": 0, "id": "a"}]}, {"tool_calls": [{"index": 0, "id": "b"}]}],
    ],
)
def test_what_does_not_begin_like_what_was_shown_is_another_answer(
    deltas: list[dict[str, Any]],
) -> None:
    first, *between, last = deltas
    got = AnswerSoFar()
    got.add(chat(first))
    rest = got.prefix()
    for other in between:
        rest.trim(chat(other))
    with pytest.raises(Diverged):
        rest.trim(chat(last))


def test_a_choice_that_ends_too_early_is_another_answer() -> None:
    got = AnswerSoFar()
    got.add(chat({"content": "abc"}, index=1))
    rest = got.prefix()
    rest.trim(chat({"content": "a"}, index=1))
    with pytest.raises(Diverged):
        rest.trim(chat({}, index=1, finish="stop"))


def test_choices_do_not_mix() -> None:
    got = AnswerSoFar()
    for index, letter in itertools.product(range(3), "ab"):
        got.add(chat({"content": f"{index}{letter}"}, index=index))
    rest = got.prefix()
    assert rest.trim(chat({"content": "1a"}, index=1)) is None
    left = rest.trim(chat({"content": "0a0bc"}, index=0))
    assert isinstance(left, dict)
    assert left["choices"][0]["delta"] == {"content": "c"}
    assert not rest.covered


def test_a_long_answer_is_put_together_in_linear_time() -> None:
    got = AnswerSoFar()
    for _ in range(50_000):
        got.add(chat({"content": "word "}))
    answer = to_answer(got)
    assert isinstance(answer, dict)
    assert len(answer["choices"][0]["message"]["content"]) == 250_000


@given(ANSWERS)
def test_nothing_of_an_answer_that_was_delivered_is_delivered_again(answer: Answer) -> None:
    delivered = AnswerSoFar()
    for chunk in to_chunks(answer):
        delivered.add(chunk)
    prefix = delivered.prefix()
    assert [prefix.trim(chunk) for chunk in to_chunks(answer) if _only_usage(chunk)] in ([], [None])


def _only_usage(chunk: Any) -> bool:
    return isinstance(chunk, dict) and not chunk["choices"]
