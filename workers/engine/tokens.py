"""The answer to a token request, whatever the engine: deltas in, `TokenChunk`s out, no SGLang and no text.

Log probabilities are read in the shape of SGLang's `meta_info`: `output_token_logprobs` holds
`(logprob, token id, text or None)` for every token of its delta, and `output_top_logprobs` a list
of such triples for each of them.
"""

from __future__ import annotations

import math
from collections.abc import AsyncGenerator, AsyncIterable
from typing import Any, Final

from inferbus.schemas.answers import (
    PromptTokensDetails,
    TokenAnswer,
    TokenChoice,
    TokenChunk,
    TokenLogprobs,
    TopLogprob,
    Usage,
)
from inferbus.schemas.errors import EngineFailed
from inferbus.schemas.requests import TokenRequest
from inferbus.workers.engine.interface import Delta

LOWEST_LOGPROB: Final = -9999.0
"""Stands for the logarithm of 0, which JSON cannot write; as in OpenAI's API."""


class TokensAnswer:
    """`inferbus.workers.engine.interface.Answer` of the kind `tokens`; used once.

    The chunks come with an empty `job`, attempt 0 and `seq` 0, for the role to set.

    Args:
        request: Says whether log probabilities are sent; its warnings go with the first chunk.
        prompt_tokens: Counted once in the usage, whatever the number of choices.
        choices: How many legs the deltas come from.
    """

    def __init__(self, request: TokenRequest, *, prompt_tokens: int, choices: int) -> None:
        self._prompt_tokens = prompt_tokens
        self._logprobs = bool(request.logprobs)
        self._top = request.top_logprobs or 0
        self._warnings = request.warnings
        self._choices: list[TokenChoice | None] = [None] * choices
        self._token_ids: list[list[int]] = [[] for _ in range(choices)]
        self._parts: list[list[TokenLogprobs]] = [[] for _ in range(choices)]
        self._cached: int | None = None
        self._open = choices

    async def chunks(self, deltas: AsyncIterable[Delta]) -> AsyncGenerator[TokenChunk, None]:
        """One chunk for each delta with tokens or a finish; the last one of the request holds the usage.

        Raises:
            EngineFailed: A choice ended twice or never, or log probabilities are missing.
        """
        warnings = self._warnings
        plain = not self._logprobs
        token_ids = self._token_ids
        async for delta in deltas:
            index, new = delta.index, delta.token_ids
            if not new and delta.finish is None:
                continue
            token_ids[index].extend(new)
            chunk = TokenChunk(job="", attempt=0, seq=0, index=index, token_ids=new)
            if not plain:
                chunk.logprobs = self._read_logprobs(delta)
            if delta.finish is not None:
                self._end(chunk, delta)
            if warnings:
                chunk.warnings, warnings = warnings, []
            yield chunk
        if self._open:
            raise EngineFailed("the engine ended without finishing every choice")

    def whole(self) -> TokenAnswer:
        """All choices, once `chunks` is exhausted."""
        choices = [choice for choice in self._choices if choice is not None]
        if len(choices) != len(self._choices):
            raise EngineFailed("the engine ended without finishing every choice")
        return TokenAnswer(job="", attempt=0, choices=choices, usage=self._usage(), warnings=self._warnings)

    def _end(self, chunk: TokenChunk, delta: Delta) -> None:
        index, finish = delta.index, delta.finish
        if finish is None:
            return
        if self._choices[index] is not None:
            raise EngineFailed("the engine finished one choice twice")
        choice = TokenChoice(
            index=index,
            token_ids=self._token_ids[index],
            finish_reason="length" if finish.reason == "length" else "stop",
            matched=finish.matched,
            logprobs=self._joined_logprobs(index),
        )
        self._choices[index] = choice
        self._open -= 1
        if index == 0:
            # Later choices hit the cache that the first one filled: only the first one's count has meaning.
            self._cached = delta.meta.get("cached_tokens")
        chunk.finish_reason, chunk.matched = choice.finish_reason, choice.matched
        if not self._open:
            chunk.usage = self._usage()

    def _usage(self) -> Usage:
        completion = sum(len(ids) for ids in self._token_ids)
        return Usage(
            prompt_tokens=self._prompt_tokens,
            completion_tokens=completion,
            total_tokens=self._prompt_tokens + completion,
            prompt_tokens_details=(
                None if self._cached is None else PromptTokensDetails(cached_tokens=self._cached)
            ),
        )

    def _read_logprobs(self, delta: Delta) -> TokenLogprobs | None:
        if not delta.token_ids:
            return None
        values = delta.meta.get("output_token_logprobs") or ()
        if len(values) != len(delta.token_ids):
            raise EngineFailed("the engine sent another number of log probabilities than of tokens")
        top: list[list[TopLogprob]] | None = None
        if self._top:
            rows = delta.meta.get("output_top_logprobs") or ()
            if len(rows) != len(delta.token_ids):
                raise EngineFailed("the engine sent another number of alternatives than of tokens")
            top = [[TopLogprob(_finite(row[0]), row[1]) for row in (of or ())][: self._top] for of in rows]
        read = TokenLogprobs(logprobs=[_finite(value[0]) for value in values], top=top)
        self._parts[delta.index].append(read)
        return read

    def _joined_logprobs(self, index: int) -> TokenLogprobs | None:
        if not self._logprobs:
            return None
        parts = self._parts[index]
        return TokenLogprobs(
            logprobs=[value for part in parts for value in part.logprobs],
            top=[row for part in parts for row in part.top or ()] if self._top else None,
        )


def _finite(value: Any) -> float:
    return float(value) if value is not None and math.isfinite(value) else LOWEST_LOGPROB
