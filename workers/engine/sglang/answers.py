"""Chat and completion answers: SGLang's own formatters, fed with our deltas.

Four things are changed. Tokens without text of their own wait for the next ones
that have some: their chunk would be empty, and SGLang sends it, or drops its log
probabilities. Log probabilities of a last step without text go with the finish
reason. With tools, the answer in one piece is what its stream said
(`toolcalls.py`). And the metadata of an answer hold texts alone.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterable, AsyncIterator
from contextlib import aclosing
from typing import Any, Final

import msgspec

from inferbus.schemas.errors import EngineFailed
from inferbus.workers.engine.interface import AnswerIdentity, Delta
from inferbus.workers.engine.sglang.redaction import unquoted
from inferbus.workers.engine.sglang.toolcalls import SentCalls

_GROWING: Final = ("output_token_logprobs", "output_top_logprobs", "output_token_ids_logprobs")
"""Lists in `meta_info` that hold one step's values when streaming by increments."""

_CREATED: Final = re.compile(r'"created":\d+')

_FINISH: Final = '"finish_reason":"'
"""In the chunk that ends a choice, and in no other, except inside of a string."""


class OpenAIAnswer:
    """`AnswerFormatter` of the kinds `chat` and `completions`.

    Args:
        handler: SGLang's `OpenAIServingChat` or `OpenAIServingCompletion`, on a `PassThrough`.
        request: SGLang's OpenAI request, as its conversion left it.
        identity: Of the answer; SGLang's own is a leg's, and of the moment of each chunk.
        prompts: The tokens of each prompt; the choices of one follow each other.
        chat: Which of the two it is.
    """

    def __init__(
        self, handler: Any, request: Any, identity: AnswerIdentity, *, prompts: list[list[int]], chat: bool
    ) -> None:
        self._handler = handler
        self._identity = identity
        self._created = f'"created":{identity.created}'
        self._request = request
        self._prompts = prompts
        self._stream = handler._generate_chat_stream if chat else handler._generate_completion_stream
        self._build = handler._build_chat_response if chat else handler._build_completion_response
        self._outputs: dict[int, dict[str, Any]] = {}
        parsed = chat and bool(handler.tool_call_parser or handler.reasoning_parser)
        self._flushes = not chat or parsed or not request.logprobs
        self._logprobs: dict[int, Any] = {}
        self._calls = SentCalls() if chat and handler.tool_call_parser and request.tools else None

    async def chunks(self, deltas: AsyncIterable[Delta]) -> AsyncIterator[bytes]:
        """SGLang's chunks as JSON objects, without the framing of server-sent events."""
        async with aclosing(self._stream(self._feed(_with_text(deltas)), self._request, None)) as events:
            async for event in events:
                body = event.removeprefix("data: ").rstrip()
                if body == "[DONE]":
                    return
                if body.startswith('{"error"'):
                    raise _streamed_error(body)
                # It stands before everything that a model or a caller has written.
                body = _CREATED.sub(self._created, body, count=1)
                if self._calls is not None or (self._logprobs and _FINISH in body):
                    yield self._amended(body)
                else:
                    yield body.encode("utf-8", "replace")

    def whole(self) -> bytes:
        """SGLang's answer to a request that does not stream, from the same deltas."""
        outputs = [
            self._outputs[index] | {"prompt_token_ids": self._prompt(index)}
            for index in sorted(self._outputs)
        ]
        if len(outputs) != len(self._prompts) * self._request.n:
            raise EngineFailed("not every choice has finished")
        response = self._build(self._request, [_joined(output) for output in outputs], self._identity.created)
        if not hasattr(response, "model_dump_json"):  # An HTTP error response.
            raise EngineFailed("SGLang could not format the answer")
        if isinstance(response.metadata, dict):
            # A list of spans; OpenAI's metadata are texts, and its types refuse the answer.
            response.metadata.pop("weight_versions", None)
        body = response.model_dump_json().encode("utf-8", "replace")
        return bytes(body if self._calls is None else self._calls.completed(body))

    def _amended(self, body: str) -> bytes:
        """A chunk, with what SGLang leaves out of it."""
        encoded = body.encode("utf-8", "replace")
        chunk = msgspec.json.decode(encoded)
        changed = self._calls is not None and self._calls.read(chunk)
        for choice in chunk["choices"]:
            if choice.get("finish_reason") and choice["index"] in self._logprobs:
                choice["logprobs"] = self._logprobs.pop(choice["index"])
                changed = True
        return msgspec.json.encode(chunk) if changed else encoded

    async def _feed(self, deltas: AsyncIterable[Delta]) -> AsyncIterator[dict[str, Any]]:
        """Deltas as SGLang's tokenizer manager would stream them for `n` choices."""
        async for delta in deltas:
            meta = delta.meta
            # The role may have corrected these: SGLang counts one leg, on one engine.
            meta["prompt_tokens"] = delta.prompt_tokens
            meta["completion_tokens"] = delta.completion_tokens
            meta["cached_tokens"] = delta.cached_tokens or 0
            # Each leg has an id of its own; OpenAI's clients expect one for all choices.
            meta["id"] = self._identity.id
            self._keep(delta, meta)
            if delta.finish is not None:
                self._end(delta, meta)
            yield {
                "text": delta.text,
                "output_ids": delta.token_ids,
                "meta_info": meta,
                "index": delta.index,
                "prompt_token_ids": self._prompt(delta.index),
            }

    def _prompt(self, index: int) -> list[int]:
        return self._prompts[index // self._request.n]

    def _end(self, delta: Delta, meta: dict[str, Any]) -> None:
        """Notes what the chunk with a choice's finish reason has to hold besides."""
        if self._calls is not None and delta.finish is not None:
            self._calls.end(delta.index, delta.finish)
        values = meta.get("output_token_logprobs")
        if not self._flushes and not delta.text and values:
            content = {"meta_info": meta}
            read = self._handler._process_streaming_logprobs(content, 0, len(values))
            self._logprobs[delta.index] = read.model_dump()

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


async def _with_text(deltas: AsyncIterable[Delta]) -> AsyncIterator[Delta]:
    """The same tokens in deltas that have text or end a choice; choice 0 has the first one."""
    waiting: dict[int, Delta] = {}
    behind: list[Delta] = []
    begun = False
    async for delta in deltas:
        before = waiting.pop(delta.index, None)
        if before is not None:
            delta = _sum(before, delta)
        if not delta.text and delta.finish is None:
            waiting[delta.index] = delta
        elif begun or delta.index == 0:
            yield delta
            begun = True
            for each in behind:
                yield each
            behind = []
        else:
            behind.append(delta)


def _sum(before: Delta, after: Delta) -> Delta:
    grown = {
        name: [*(before.meta.get(name) or ()), *(after.meta.get(name) or ())]
        for name in _GROWING
        if name in before.meta or name in after.meta
    }
    return msgspec.structs.replace(
        after, token_ids=before.token_ids + after.token_ids, meta={**after.meta, **grown}
    )


def _joined(output: dict[str, Any]) -> dict[str, Any]:
    return {
        **output,
        "text": "".join(output["text"]),
        "meta_info": {**output["meta_info"], **output["grown"]},
    }


def _streamed_error(body: str) -> EngineFailed:
    """An error that SGLang's formatter put into its stream: its own, since ours pass through it."""
    message = msgspec.json.decode(body)["error"].get("message")
    return EngineFailed(f"SGLang could not format the answer: {unquoted(message)}")
