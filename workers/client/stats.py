"""The line that ends every answer in a terminal: how much, how fast, by whom."""

from __future__ import annotations

from typing import Any

import msgspec

from inferbus.schemas.answers import Usage
from inferbus.workers.client.stream import Stream


class Stats(msgspec.Struct, frozen=True, kw_only=True):
    """What an answer cost.

    Attributes:
        usage: Tokens; None where the answer did not tell them, such as one that was cancelled.
        first: Seconds to the first token; None where there was none, or the answer was stored before.
        seconds: Seconds in all.
        rate: Tokens a second after the first one; None for less than two tokens, likewise.
        worker: The worker that answered.
        prefill_worker: The prefill worker that served it, if one did.
    """

    usage: Usage | None
    first: float | None
    seconds: float
    rate: float | None
    worker: str | None
    prefill_worker: str | None

    @classmethod
    def of(cls, stream: Stream[Any]) -> Stats:
        """The stats of a stream that has ended."""
        usage = stream.usage
        ended = stream.ended if stream.ended is not None else stream.started
        first = None if stream.replayed else stream.first
        rate = None
        if first is not None and usage is not None and usage.completion_tokens > 1 and ended > first:
            rate = (usage.completion_tokens - 1) / (ended - first)
        return cls(
            usage=usage,
            first=None if first is None else first - stream.started,
            seconds=ended - stream.started,
            rate=rate,
            worker=stream.worker,
            prefill_worker=stream.prefill_worker,
        )

    def line(self) -> str:
        """All of it in one line."""
        parts = [] if self.usage is None else [_count(self.usage.completion_tokens, "token")]
        if self.first is not None:
            parts.append(f"first after {self.first:.3f} s")
        if self.rate is not None:
            parts.append(f"{self.rate:.1f} tokens/s")
        workers = [f"prefill {self.prefill_worker}"] if self.prefill_worker else []
        if self.worker:
            workers.append(f"{'decode' if workers else 'worker'} {self.worker}")
        if workers:
            parts.append(" → ".join(workers))
        if self.usage is not None:
            details = self.usage.prompt_tokens_details
            cached = details.cached_tokens if details else 0
            parts.append(f"{_count(self.usage.prompt_tokens, 'prompt token')}, {cached} cached")
        return " · ".join(parts) or f"{self.seconds:.3f} s"


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"
