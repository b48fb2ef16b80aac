"""What a model said, with attributes."""

from __future__ import annotations

from typing import Any

import pytest

from inferbus import InferbusError, message
from inferbus.schemas.answers import EmbeddingsAnswer, TokenAnswer, TokenChoice, Usage
from tests.support.answers import chat_answer

USAGE = Usage(prompt_tokens=3, completion_tokens=5, total_tokens=8)
CALL = {"id": "call-1", "index": 0, "type": "function", "function": {"name": "add", "arguments": '{"a":1}'}}


def answer(**said: Any) -> dict[str, Any]:
    whole = chat_answer("")
    whole["choices"] = [{"index": 0, "message": said, "finish_reason": "tool_calls"}]
    return whole


def test_a_chats_text_is_its_content() -> None:
    found = message(chat_answer("Paris"))
    assert (found.role, found.content, found.finish_reason) == ("assistant", "Paris", "stop")
    assert (found.tool_calls, found.reasoning_content, found.refusal, found.index) == ([], None, None, 0)


def test_tool_calls_have_attributes_and_null_is_the_default() -> None:
    found = message(
        answer(role="assistant", content=None, tool_calls=[CALL, CALL | {"id": None}], refusal=None)
    )
    assert found.content is None
    assert found.finish_reason == "tool_calls"
    assert [each.id for each in found.tool_calls] == ["call-1", None]
    assert (found.tool_calls[0].function.name, found.tool_calls[0].function.arguments) == ("add", '{"a":1}')
    assert message(answer(role="assistant", content="a", tool_calls=None)).tool_calls == []


def test_reasoning_is_told_apart() -> None:
    assert message(answer(content="b", reasoning_content="a")).reasoning_content == "a"


def test_a_completions_text_is_its_content() -> None:
    whole = chat_answer("") | {"object": "text_completion"}
    whole["choices"] = [
        {"index": 1, "text": "b", "finish_reason": "length"},
        {"index": 0, "text": "a", "finish_reason": "stop"},
    ]
    assert [message(whole, index=index).content for index in (0, 1)] == ["a", "b"]
    with pytest.raises(ValueError, match="no choice 2"):
        message(whole, index=2)


def test_token_answers_have_their_tokens() -> None:
    whole = TokenAnswer(
        job="j",
        attempt=1,
        choices=[TokenChoice(index=0, token_ids=[5, 6], finish_reason="length")],
        usage=USAGE,
    )
    assert (message(whole).token_ids, message(whole).finish_reason) == ([5, 6], "length")
    with pytest.raises(ValueError, match="no choice 1"):
        message(whole, index=1)


def test_what_is_computed_has_no_choices() -> None:
    computed = EmbeddingsAnswer(job="j", attempt=1, model="m", data=[], usage=USAGE)
    with pytest.raises(ValueError, match="no choices"):
        message(computed)


def test_an_answer_that_is_not_of_the_contract_is_an_error_of_the_tree() -> None:
    with pytest.raises(InferbusError):
        message(answer(content=["a"]))
    with pytest.raises(InferbusError):
        message(answer(tool_calls=[{"function": {"arguments": 5}}]))
