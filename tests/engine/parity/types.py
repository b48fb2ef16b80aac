"""Whether an answer has the types of the `openai` package, which the package itself does not check."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.shared import ErrorObject
from pydantic import ValidationError

from tests.engine.parity.told import Told


def problems_of(told: Told) -> Iterator[str]:
    """What does not fit, by field."""
    if told.error is not None:
        yield from _problems(ErrorObject, {"param": None, **told.error})
    if told.whole is not None:
        chat = told.whole["object"] == "chat.completion"
        yield from _problems(ChatCompletion if chat else Completion, _with_all_logprobs(told.whole))
    for chunk in told.chunks or ():
        chat = chunk["object"] == "chat.completion.chunk"
        yield from _problems(ChatCompletionChunk if chat else Completion, chunk if chat else _ended(chunk))


def _problems(kind: Any, body: dict[str, Any]) -> Iterator[str]:
    try:
        kind.model_validate(body)
    except ValidationError as error:
        yield from (f"{each['loc']}: {each['msg']}" for each in error.errors())


def _ended(chunk: dict[str, Any]) -> dict[str, Any]:
    """As the types have a chunk of a completion: OpenAI's API, too, sends `null` until the end."""
    choices = [{**choice, "finish_reason": choice["finish_reason"] or "stop"} for choice in chunk["choices"]]
    return _with_all_logprobs({**chunk, "choices": choices})


def _with_all_logprobs(body: dict[str, Any]) -> dict[str, Any]:
    """Without the `null` of the first token of an echo, which OpenAI's API sends as well."""
    choices = []
    for choice in body["choices"]:
        found = choice.get("logprobs") or {}
        if "token_logprobs" in found:
            cut = {name: [each for each in values if each is not None] for name, values in found.items()}
            choice = {**choice, "logprobs": cut}
        choices.append(choice)
    return {**body, "choices": choices}
