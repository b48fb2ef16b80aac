"""Chat and completion messages of a scripted engine: the shape of OpenAI's, and no more."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterable, Sequence
from typing import Any, Final, Literal

import msgspec

from inferbus.schemas.answers import PromptTokensDetails, Usage
from inferbus.schemas.errors import EngineFailed
from inferbus.workers.engine.interface import AnswerIdentity, Delta

OBJECTS: Final = {
    "chat": ("chat.completion", "chat.completion.chunk", "chatcmpl-"),
    "completions": ("text_completion", "text_completion", "cmpl-"),
}


class TextAnswer:
    """`AnswerFormatter` of the kinds `chat` and `completions`; used once."""

    def __init__(
        self,
        kind: Literal["chat", "completions"],
        *,
        model: str,
        identity: AnswerIdentity,
        prompt_tokens: int,
        choices: int = 1,
        include_usage: bool = False,
        echoes: Sequence[str] = (),
    ) -> None:
        """Sets what all messages of the answer have in common.

        Args:
            kind: Which of the two.
            model: The served model name.
            identity: Of the answer.
            prompt_tokens: Of all prompts, each counted once, whatever the number of its choices.
            choices: How many.
            include_usage: Whether a last chunk holds the usage.
            echoes: Come before the text of each choice.
        """
        self._chat = kind == "chat"
        self._whole, self._chunk, prefix = OBJECTS[kind]
        self._identity: dict[str, Any] = {
            "id": prefix + identity.id,
            "created": identity.created,
            "model": model,
        }
        self._prompt_tokens = prompt_tokens
        self._include_usage = include_usage
        self._echoes = echoes or [""] * choices
        self._parts: list[list[str]] = [[] for _ in range(choices)]
        self._reasons: list[str | None] = [None] * choices
        self._completion_tokens = 0
        self._cached: int | None = None

    async def chunks(self, deltas: AsyncIterable[Delta]) -> AsyncGenerator[bytes, None]:
        """One chunk a piece of text; the role comes first, the finish reason after the text.

        Raises:
            EngineFailed: A choice did not end.
        """
        head, tail = self._frame()
        begun: set[int] = set()
        parts = self._parts
        async for delta in deltas:
            index, text = delta.index, delta.text
            self._completion_tokens += len(delta.token_ids)
            if index not in begun:
                begun.add(index)
                if self._chat:
                    yield self._message([self._choice(index, {"role": "assistant", "content": ""})])
                text = self._echoes[index] + text
            if text:
                parts[index].append(text)
                yield b"".join((head[index], msgspec.json.encode(text), tail))
            if delta.finish is not None:
                self._reasons[index] = delta.finish.reason
                if index == 0:
                    self._cached = delta.cached_tokens
                yield self._message([self._choice(index, {} if self._chat else "", delta.finish.reason)])
        if None in self._reasons:
            raise EngineFailed("the engine ended without finishing every choice")
        if self._include_usage:
            yield self._message([], usage=self._usage())

    def whole(self) -> bytes:
        """The answer in one piece, once `chunks` is exhausted."""
        choices = []
        for index, (parts, reason) in enumerate(zip(self._parts, self._reasons, strict=True)):
            text = "".join(parts)
            content = {"message": {"role": "assistant", "content": text}} if self._chat else {"text": text}
            choices.append({"index": index, **content, "logprobs": None, "finish_reason": reason})
        return self._message(choices, object=self._whole, usage=self._usage())

    def _frame(self) -> tuple[list[bytes], bytes]:
        """What stands before and after the text in a chunk of each choice, encoded once."""
        mark = "\x00"
        made = [
            self._message([self._choice(index, {"content": mark} if self._chat else mark)])
            for index in range(len(self._parts))
        ]
        pairs = [message.split(b'"\\u0000"') for message in made]
        return [head for head, _ in pairs], pairs[0][1]

    def _choice(self, index: int, content: Any, reason: str | None = None) -> dict[str, Any]:
        name = "delta" if self._chat else "text"
        return {"index": index, name: content, "logprobs": None, "finish_reason": reason}

    def _message(self, choices: list[dict[str, Any]], **fields: Any) -> bytes:
        return msgspec.json.encode({"object": self._chunk} | self._identity | {"choices": choices} | fields)

    def _usage(self) -> Usage:
        return Usage(
            prompt_tokens=self._prompt_tokens,
            completion_tokens=self._completion_tokens,
            total_tokens=self._prompt_tokens + self._completion_tokens,
            prompt_tokens_details=(
                None if self._cached is None else PromptTokensDetails(cached_tokens=self._cached)
            ),
        )
