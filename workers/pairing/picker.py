"""Which prefill worker computes a prompt: one that fits, that knows the prefix, and that is not swamped.

Rendezvous hashing of the prompt's leading tokens sends equal prefixes to the
same radix cache without a router process and moves few prefixes when workers
come and go. Its load is bounded: a worker that has more of this decode
worker's hand-offs than its fair share and a quarter is passed over, so that
one hot prefix cannot swamp it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from hashlib import blake2b
from typing import Final

from inferbus.schemas.errors import PrefillUnavailable
from inferbus.schemas.fleet import Signature, WorkerInfo

PREFIX_TOKENS: Final = 256
"""Leading tokens that are hashed: long enough to tell system prompts apart, short enough to be shared."""

LOAD_BOUND: Final = 1.25
"""How far above the mean a worker's open hand-offs may be."""


class Picker:
    """Picks prefill workers for one decode worker.

    Args:
        signature: Of the decode engine; only workers with an equal one can send to it.
        workers: Gives the workers that are announced now.
    """

    def __init__(self, signature: Signature | None, workers: Callable[[], Sequence[WorkerInfo]]) -> None:
        self._signature = signature
        self._workers = workers
        self._open: Counter[str] = Counter()

    def pick(self, token_ids: Sequence[int], *, passed_over: frozenset[str] = frozenset()) -> WorkerInfo:
        """The worker for a prompt.

        Args:
            token_ids: The prompt.
            passed_over: Workers that failed it already.

        Raises:
            PrefillUnavailable: None fits; the message says how many were there and why they do not.
        """
        present, fitting = self._present()
        left = [info for info in fitting if info.worker not in passed_over]
        if not left:
            raise PrefillUnavailable(
                f"no prefill worker: {len(present)} ready, {len(present) - len(fitting)} with another "
                f"signature, {len(fitting) - len(left)} failed this request already"
            )
        large = [info for info in left if info.capacity and len(token_ids) < info.capacity.kv_tokens]
        if not large:
            raise PrefillUnavailable("no prefill worker has a KV cache that is large enough for this prompt")
        bound = math.ceil(LOAD_BOUND * (sum(self._open[info.worker] for info in large) + 1) / len(large))
        prefix = _digest(token_ids[:PREFIX_TOKENS])
        ranked = sorted(large, key=lambda info: _score(prefix, info.worker), reverse=True)
        return next((info for info in ranked if self._open[info.worker] < bound), ranked[0])

    @property
    def unavailable_reason(self) -> str | None:
        """Why no prompt whatever can be computed at the moment; None where one can."""
        present, fitting = self._present()
        others = len(present) - len(fitting)
        return (
            None if fitting else f"no prefill worker: {len(present)} ready, {others} with another signature"
        )

    @property
    def fitting(self) -> list[WorkerInfo]:
        """The prefill workers that take hand-offs and whose engine fits."""
        return self._present()[1]

    def _present(self) -> tuple[list[WorkerInfo], list[WorkerInfo]]:
        """The prefill workers that take hand-offs, and those of them that fit."""
        ready = [info for info in self._workers() if info.role == "prefill" and info.state == "ready"]
        return ready, [info for info in ready if self._signature is None or info.signature == self._signature]

    @contextmanager
    def using(self, worker: str) -> Iterator[None]:
        """Counts a hand-off as open while the block runs."""
        self._open[worker] += 1
        try:
            yield
        finally:
            self._open[worker] -= 1
            if not self._open[worker]:
                del self._open[worker]


def _digest(token_ids: Sequence[int]) -> bytes:
    raw = b"".join(token.to_bytes(4, "little") for token in token_ids)
    return blake2b(raw, digest_size=16).digest()


def _score(prefix: bytes, worker: str) -> bytes:
    return blake2b(prefix + worker.encode(), digest_size=8).digest()
