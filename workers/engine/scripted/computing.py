"""Computed kinds of a scripted engine: its tokenizer of bytes, and embeddings that count tokens."""

from __future__ import annotations

import asyncio
import math
import secrets
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing

from inferbus.schemas.answers import ComputedAnswer, DetokenizeAnswer, TokenizeAnswer
from inferbus.schemas.computed import AnyComputed, DetokenizeRequest, EmbeddingsRequest, TokenizeRequest
from inferbus.schemas.errors import ContextLengthExceeded, InvalidRequest, NotSupported
from inferbus.workers.engine.computed import Known, embeddings_answer
from inferbus.workers.engine.interface import Computation, Delta, EngineInfo, Leg
from inferbus.workers.engine.scripted.prompt import render
from inferbus.workers.engine.scripted.script import USER
from inferbus.workers.engine.scripted.text import ByteTokenizer

Generate = Callable[[Leg], AsyncGenerator[Delta, None]]
"""Plays a leg, with the delays and faults of its rule."""


def plan(
    request: AnyComputed, info: EngineInfo, tokenizer: ByteTokenizer, dimensions: int, generate: Generate
) -> Computation:
    """A checked request of a computed kind.

    Args:
        request: As it came.
        info: Of the engine.
        tokenizer: Of the engine.
        dimensions: Of its embeddings.
        generate: See `Generate`.

    Raises:
        CallerError: It cannot be served.
    """
    if request.kind not in info.kinds:
        raise NotSupported(f"this engine does not serve the kind {request.kind!r}")
    match request:
        case EmbeddingsRequest():
            if request.dimensions not in (None, dimensions):
                raise InvalidRequest(f"dimensions must be {dimensions}", param="dimensions")
            inputs = [_checked(param, each, info, tokenizer) for param, each in request.inputs]
            return _Embeddings(request, inputs, info.model, dimensions, generate)
        case TokenizeRequest():
            return Known(_tokenized(request, info, tokenizer))
        case DetokenizeRequest():
            for param, token_ids in request.lists:
                _check_vocabulary(param, token_ids, info)
            texts = [tokenizer.decode(token_ids) for _, token_ids in request.lists]
            return Known(DetokenizeAnswer(job="", attempt=0, text=texts if request.several else texts[0]))


def _checked(param: str, given: str | list[int], info: EngineInfo, tokenizer: ByteTokenizer) -> list[int]:
    token_ids = tokenizer.encode(given) if isinstance(given, str) else given
    _check_vocabulary(param, token_ids, info)
    if len(token_ids) >= info.capacity.context_length:
        message = f"{param} has {len(token_ids)} tokens, the context has {info.capacity.context_length}"
        raise ContextLengthExceeded(message, param=param, prompt=len(token_ids), total=len(token_ids) + 1)
    return token_ids


def _check_vocabulary(param: str, token_ids: list[int], info: EngineInfo) -> None:
    if max(token_ids, default=0) >= info.capacity.vocabulary:
        raise InvalidRequest(f"{param} holds a token id outside the vocabulary", param=param)


def _tokenized(request: TokenizeRequest, info: EngineInfo, tokenizer: ByteTokenizer) -> TokenizeAnswer:
    longest = info.capacity.context_length
    if isinstance(request.prompt, list):
        several = [tokenizer.encode(text) for text in request.prompt]
        counts = [len(ids) for ids in several]
        return TokenizeAnswer(job="", attempt=0, tokens=[*several], count=counts, max_model_len=longest)
    text = render(request.chat) if request.chat is not None else request.prompt or ""
    tokens = tokenizer.encode(text)
    return TokenizeAnswer(job="", attempt=0, tokens=[*tokens], count=len(tokens), max_model_len=longest)


class _Embeddings:
    """`Computation` of an embeddings request."""

    def __init__(
        self,
        request: EmbeddingsRequest,
        inputs: Sequence[list[int]],
        model: str,
        dimensions: int,
        generate: Generate,
    ) -> None:
        self._request = request
        self._inputs = inputs
        self._model = model
        self._dimensions = dimensions
        self._generate = generate
        self.prompt_tokens = sum(map(len, inputs))

    async def answer(self, priority: int) -> ComputedAnswer:
        """See `Computation.answer`."""
        tasks = [asyncio.create_task(self._embed(i, each, priority)) for i, each in enumerate(self._inputs)]
        try:
            vectors = await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        return embeddings_answer(self._request, vectors, model=self._model, prompt_tokens=self.prompt_tokens)

    async def _embed(self, index: int, token_ids: list[int], priority: int) -> list[float]:
        options = {"priority": priority} | ({USER: self._request.user} if self._request.user else {})
        sampling = {"max_new_tokens": 1}
        leg = Leg(
            rid=secrets.token_hex(16), index=index, token_ids=token_ids, sampling=sampling, options=options
        )
        async with aclosing(self._generate(leg)) as deltas:
            async for _ in deltas:
                pass
        return _vector(token_ids, self._dimensions)


def _vector(token_ids: list[int], dimensions: int) -> list[float]:
    """A unit vector that counts tokens by their remainder."""
    counts = Counter(token % dimensions for token in token_ids)
    length = math.sqrt(sum(count * count for count in counts.values()))
    return [counts[each] / length for each in range(dimensions)]
