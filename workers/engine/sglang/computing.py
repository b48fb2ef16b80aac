"""Requests of computed kinds on SGLang: embeddings, and its tokenizer.

An embedding is one engine call an input, like a leg: SGLang's own batches give every input an id of its own,
too, and a batch cannot be aborted as one. Tokenising needs no engine. The tokens of a chat's messages
are what its conversion makes of them (`serving.py`).
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from typing import Any, Final, TypeVar

import structlog

from inferbus.schemas.answers import ComputedAnswer, DetokenizeAnswer, TokenizeAnswer
from inferbus.schemas.computed import AnyComputed, DetokenizeRequest, EmbeddingsRequest, TokenizeRequest
from inferbus.schemas.errors import (
    ContextLengthExceeded,
    EngineFailed,
    InvalidRequest,
    NotSupported,
    Overloaded,
)
from inferbus.workers import tracing
from inferbus.workers.engine.computed import Known, embeddings_answer
from inferbus.workers.engine.interface import Computation
from inferbus.workers.engine.sglang.bounds import Bounds
from inferbus.workers.engine.sglang.calls import UNAVAILABLE
from inferbus.workers.engine.sglang.redaction import unquoted
from inferbus.workers.engine.sglang.serving import LONG_CHARS, Serving

log = structlog.get_logger()

T = TypeVar("T")

_THREADS: Final = ThreadPoolExecutor(max_workers=1, thread_name_prefix="inferbus-tokenizing")
"""Long texts take the tokenizer longer than the event loop may wait."""

_JSON_INTEGERS: Final = range(-(2**63), 2**64)
"""What SGLang's server can write."""


class Computing:
    """Plans requests of computed kinds for one engine.

    Args:
        manager: SGLang's tokenizer manager.
        bounds: The engine's limits.
        serving: Renders chats; None without a tokenizer.
    """

    def __init__(self, manager: Any, *, bounds: Bounds, serving: Serving | None) -> None:
        self._manager = manager
        self._bounds = bounds
        self._serving = serving
        self._fields = _request_fields()

    async def plan(self, request: AnyComputed) -> Computation:
        """See `Engine.plan`."""
        match request:
            case EmbeddingsRequest():
                return await self._embeddings(request)
            case TokenizeRequest():
                return Known(await self._tokenized(request))
            case DetokenizeRequest():
                return Known(await self._detokenized(request))

    async def _embeddings(self, request: EmbeddingsRequest) -> _Embeddings:
        self._check_dimensions(request)
        texts = {i: each for i, (_, each) in enumerate(request.inputs) if isinstance(each, str)}
        if texts and self._manager.tokenizer is None:
            raise NotSupported("this worker has no tokenizer; input must be token ids", param="input")
        found = dict(zip(texts, await self._encoded(list(texts.values())), strict=True)) if texts else {}
        inputs = [
            found[i] if isinstance(each, str) else list(each) for i, (_, each) in enumerate(request.inputs)
        ]
        for (param, _), token_ids in zip(request.inputs, inputs, strict=True):
            self._bounds.check_ids(token_ids, param)
            longest = self._bounds.longest_prompt
            if len(token_ids) > longest:
                raise ContextLengthExceeded(
                    f"{param} has {len(token_ids)} tokens; at most {longest} fit this worker",
                    param=param,
                    prompt=len(token_ids),
                    total=len(token_ids) + 1,
                )
        return _Embeddings(self, request, inputs)

    def _check_dimensions(self, request: EmbeddingsRequest) -> None:
        """As SGLang does, whose messages name the model's folder."""
        config, wanted = self._manager.model_config, request.dimensions
        if wanted is None:
            return
        if not config.is_matryoshka:
            raise InvalidRequest("this model's embeddings have one number of dimensions", param="dimensions")
        trained = config.matryoshka_dimensions
        if trained and wanted not in trained:
            known = ", ".join(map(str, sorted(trained)))
            raise InvalidRequest(f"dimensions must be one of {known}", param="dimensions")
        if wanted > config.hidden_size:
            raise InvalidRequest(f"dimensions must be at most {config.hidden_size}", param="dimensions")

    async def _encoded(self, texts: list[str]) -> list[list[int]]:
        """Texts as the tokenizer manager tokenises those that come to it."""
        tokenizing = self._manager._tokenize_texts(texts, False)
        token_ids, _ = await (tokenizing if _short(texts) else _in_thread(asyncio.run, tokenizing))
        return [list(ids) for ids in token_ids]

    async def _tokenized(self, request: TokenizeRequest) -> TokenizeAnswer:
        tokens: list[Any]
        if request.prompt is None:
            assert self._serving is not None  # Without a tokenizer this kind is not served.
            tokens = await self._serving.tokenize(request)
            count: int | list[int] = len(tokens)
        else:
            texts = [request.prompt] if isinstance(request.prompt, str) else request.prompt
            encoded = await self._each(texts, self._encode, request.add_special_tokens is not False)
            tokens = encoded[0] if isinstance(request.prompt, str) else encoded
            count = len(tokens) if isinstance(request.prompt, str) else [len(ids) for ids in encoded]
        return TokenizeAnswer(job="", attempt=0, tokens=[*tokens], count=count, max_model_len=self._longest())

    def _encode(self, texts: Sequence[str], special: bool) -> list[list[int]]:
        return [list(self._manager.tokenizer.encode(text, add_special_tokens=special)) for text in texts]

    async def _detokenized(self, request: DetokenizeRequest) -> DetokenizeAnswer:
        given = list(request.lists)
        for param, token_ids in given:
            if token_ids:
                self._bounds.check_ids(token_ids, param)
        texts = await self._each([ids for _, ids in given], self._decode, request.skip_special_tokens)
        return DetokenizeAnswer(job="", attempt=0, text=texts if request.several else texts[0])

    def _decode(self, lists: Sequence[list[int]], skip: bool) -> list[str]:
        return [str(self._manager.tokenizer.decode(ids, skip_special_tokens=skip)) for ids in lists]

    async def _each(self, items: Sequence[Any], convert: Any, option: bool) -> Any:
        """What a tokenizer makes of every item; of long ones in a thread."""
        return convert(items, option) if _short(items) else await _in_thread(convert, items, option)

    def _longest(self) -> int:
        """As SGLang's server tells it: some tokenizers name a number that JSON cannot have."""
        named = getattr(self._manager.tokenizer, "model_max_length", -1)
        return named if isinstance(named, int) and named in _JSON_INTEGERS else self._manager.context_len

    async def embed(self, request: EmbeddingsRequest, token_ids: list[int], priority: int) -> list[float]:
        """One engine call; closing it aborts it.

        Raises:
            InvalidRequest: The engine refused it.
            Overloaded: It has no room for it.
            EngineFailed: It gave no embedding.
        """
        from fastapi import HTTPException

        try:
            call = self._call(request, token_ids, priority)
            async with aclosing(self._manager.generate_request(call, None)) as outputs:
                async for output in outputs:
                    reason = output["meta_info"].get("finish_reason") or {}
                    if reason.get("type") != "abort":
                        vector: list[float] = output["embedding"]
                        return vector
        except ValueError as error:
            raise InvalidRequest(f"the engine refused the request: {unquoted(error)}") from error
        except HTTPException as error:
            log.warning("embedding.aborted", status=error.status_code, reason=unquoted(error.detail))
            if error.status_code == UNAVAILABLE:
                raise Overloaded("the engine has no room for the request") from error
            raise EngineFailed("the engine aborted the request") from error
        raise EngineFailed("the engine gave no embedding")

    def _call(self, request: EmbeddingsRequest, token_ids: list[int], priority: int) -> Any:
        from sglang.srt.managers.io_struct import EmbeddingReqInput

        fields: dict[str, Any] = {
            # Of fixed length: SGLang aborts every request whose id begins with it.
            "rid": secrets.token_hex(16),
            "input_ids": token_ids,
            "priority": priority,
            "dimensions": request.dimensions,
            "lora_path": request.lora_path,
        }
        if tracing.active():
            fields["external_trace_header"] = tracing.carried()
        return EmbeddingReqInput(**{name: value for name, value in fields.items() if name in self._fields})

    @property
    def model(self) -> str:
        """The served model name."""
        return str(self._manager.served_model_name)


class _Embeddings:
    """`Computation` of an embeddings request."""

    def __init__(self, computing: Computing, request: EmbeddingsRequest, inputs: list[list[int]]) -> None:
        self._computing = computing
        self._request = request
        self._inputs = inputs
        self.prompt_tokens = sum(map(len, inputs))

    async def answer(self, priority: int) -> ComputedAnswer:
        """See `Computation.answer`."""
        embed = self._computing.embed
        vectors = await _all([embed(self._request, token_ids, priority) for token_ids in self._inputs])
        return embeddings_answer(
            self._request, vectors, model=self._computing.model, prompt_tokens=self.prompt_tokens
        )


async def _all(work: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """The results of work at the same time; the first failure, or a cancellation, ends all of it."""
    tasks = [asyncio.create_task(each) for each in work]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _short(items: Sequence[Any]) -> bool:
    return sum(map(len, items)) < LONG_CHARS


async def _in_thread(work: Any, *arguments: Any) -> Any:
    return await asyncio.get_running_loop().run_in_executor(_THREADS, work, *arguments)


def _request_fields() -> frozenset[str]:
    from sglang.srt.managers.io_struct import EmbeddingReqInput

    return frozenset(EmbeddingReqInput.__dataclass_fields__)
