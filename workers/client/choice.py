"""What a model said, with attributes: one choice of a whole answer, its tool calls put together."""

from __future__ import annotations

from typing import Any

import msgspec

from inferbus.schemas.answers import ComputedAnswer, TokenAnswer
from inferbus.schemas.errors import InternalError
from inferbus.workers.client.messages import Answer, convert


class Function(msgspec.Struct, frozen=True, kw_only=True):
    """What a tool call calls.

    Attributes:
        name: Of the tool.
        arguments: JSON, as the model wrote it: it may be wrong, or cut off.
    """

    name: str | None = None
    arguments: str = ""


class ToolCall(msgspec.Struct, frozen=True, kw_only=True):
    """One tool call.

    Attributes:
        id: To be named by the tool's answer.
        type: `function`.
        function: What is called.
    """

    id: str | None = None
    type: str = "function"
    function: Function = Function()


class Message(msgspec.Struct, frozen=True, kw_only=True):
    """One choice of an answer.

    Attributes:
        content: The text, of a completion too; None where the model said none.
        tool_calls: In the order of the model.
        finish_reason: `stop`, `length`, `tool_calls`, …
        reasoning_content: What it thought before, where that is told apart.
        refusal: Why it did not answer, where the model says that apart.
        role: `assistant`.
        token_ids: Of the kind `tokens`.
        index: The choice.
    """

    content: str | None = None
    tool_calls: list[ToolCall] = []
    finish_reason: str | None = None
    reasoning_content: str | None = None
    refusal: str | None = None
    role: str = "assistant"
    token_ids: list[int] = []
    index: int = 0


def message(answer: Answer, *, index: int = 0) -> Message:
    """A choice of a whole answer.

    Args:
        answer: From `await stream`, or a `Result`.
        index: Which choice.

    Raises:
        ValueError: It has no such choice; an answer that was computed has none.
        InternalError: The answer is not of the contract.
    """
    if isinstance(answer, ComputedAnswer):
        raise ValueError("this answer has no choices")
    if isinstance(answer, TokenAnswer):
        found = next((each for each in answer.choices if each.index == index), None)
        if found is None:
            raise ValueError(f"the answer has no choice {index}")
        return Message(token_ids=found.token_ids, finish_reason=found.finish_reason, index=index)
    choice = next((each for each in answer["choices"] if each.get("index", 0) == index), None)
    if choice is None:
        raise ValueError(f"the answer has no choice {index}")
    said: dict[str, Any] = choice.get("message") or {"content": choice.get("text")}
    # What is null is the default.
    fields = {name: value for name, value in said.items() if value is not None}
    calls = [_without_null(call) for call in fields.pop("tool_calls", None) or ()]
    try:
        return convert(
            {**fields, "tool_calls": calls, "finish_reason": choice.get("finish_reason"), "index": index},
            Message,
        )
    except TypeError as error:
        raise InternalError("an answer is not of the contract: its message") from error


def _without_null(node: dict[str, Any]) -> dict[str, Any]:
    plain = {name: value for name, value in node.items() if value is not None}
    return {name: _without_null(value) if isinstance(value, dict) else value for name, value in plain.items()}
