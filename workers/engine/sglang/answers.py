"""Chat and completion answers: SGLang's own formatters, fed with our deltas."""

from __future__ import annotations

import time
from collections.abc import AsyncIterable, AsyncIterator
from contextlib import aclosing
from typing import Any, Final

import msgspec

from inferbus.schemas.errors import EngineFailed
from inferbus.workers.engine.interface import Delta
from inferbus.workers.engine.sglang.redaction import unquoted

_GROWING: Final = ("output_token_logprobs", "output_top_logprobs", "output_token_ids_logprobs")
"""Lists in `meta_info` that hold one step's values when streaming by increments."""


class OpenAIAnswer:
    """`Answer` of the kinds `chat` and `completions`.

    Args:
        handler: SGLang's `OpenAIServingChat` or `OpenAIServingCompletion`, on a `PassThrough`.
        request: SGLang's OpenAI request, as its conversion left it.
        chat: Which of the two it is.
    """

    def __init__(self, handler: Any, request: Any, *, chat: bool) -> None:
        self._request = request
        self._stream = handler._generate_chat_stream if chat else handler._generate_completion_stream
        self._build = handler._build_chat_response if chat else handler._build_completion_response
        self._outputs: dict[int, dict[str, Any]] = {}
        self._id: str | None = None

    async def chunks(self, deltas: AsyncIterable[Delta]) -> AsyncIterator[bytes]:
        """SGLang's chunks as JSON objects, without the framing of server-sent events."""
        async with aclosing(self._stream(self._feed(deltas), self._request, None)) as events:
            async for event in events:
                body = event.removeprefix("data: ").rstrip()
                if body == "[DONE]":
                    return
                if body.startswith('{"error"'):
                    raise _streamed_error(body)
                yield body.encode("utf-8", "replace")

    def whole(self) -> bytes:
        """SGLang's answer to a request that does not stream, from the same deltas."""
        outputs = [self._outputs[index] for index in sorted(self._outputs)]
        if len(outputs) != (self._request.n or 1):
            raise EngineFailed("not every choice has finished")
        response = self._build(self._request, [_joined(output) for output in outputs], int(time.time()))
        if not hasattr(response, "model_dump_json"):  # An HTTP error response.
            raise EngineFailed("SGLang could not format the answer")
        return bytes(response.model_dump_json().encode("utf-8", "replace"))

    async def _feed(self, deltas: AsyncIterable[Delta]) -> AsyncIterator[dict[str, Any]]:
        """Deltas as SGLang's tokenizer manager would stream them for `n` choices."""
        async for delta in deltas:
            meta = delta.meta
            if self._id is None:
                self._id = meta.setdefault("id", "")
            elif meta.get("id") != self._id:
                # Each leg has an id of its own; OpenAI's clients expect one for all choices.
                meta = {**meta, "id": self._id}
            self._keep(delta, meta)
            yield {
                "text": delta.text,
                "output_ids": delta.token_ids,
                "meta_info": meta,
                "index": delta.index,
            }

    def _keep(self, delta: Delta, meta: dict[str, Any]) -> None:
        output = self._outputs.get(delta.index)
        if output is None:
            grown = {name: list(meta[name]) for name in _GROWING if name in meta}
            self._outputs[delta.index] = {
                "text": [delta.text],
                "output_ids": list(delta.token_ids),
                "meta_info": meta,
                "grown": grown,
            }
            return
        output["text"].append(delta.text)
        output["output_ids"] += delta.token_ids
        output["meta_info"] = meta
        for name, values in output["grown"].items():
            values += meta.get(name) or ()


def _joined(output: dict[str, Any]) -> dict[str, Any]:
    return {
        "text": "".join(output["text"]),
        "output_ids": output["output_ids"],
        "meta_info": {**output["meta_info"], **output["grown"]},
    }


def _streamed_error(body: str) -> EngineFailed:
    """An error that SGLang's formatter put into its stream: its own, since ours pass through it."""
    message = msgspec.json.decode(body)["error"].get("message")
    return EngineFailed(f"SGLang could not format the answer: {unquoted(message)}")
