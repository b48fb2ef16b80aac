"""Token counts, times and workers of an answer, and the line that shows them in a terminal."""

from __future__ import annotations

from typing import Any

import msgspec

from inferbus.schemas.answers import Usage
from inferbus.workers.client.stream import AnswerStream


class Stats(msgspec.Struct, frozen=True, kw_only=True):
    """Statistics of one answer.

    Attributes:
        usage: Token counts; None where the answer has none, for example after a cancellation.
        first: Seconds to the first token; None without one, or where the answer was read from storage.
        seconds: Seconds in all.
        rate: Tokens per second after the first one; None for less than two tokens, or where `first` is None.
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
    def of(cls, answer: AnswerStream[Any]) -> Stats:
        """The statistics of an answer that has ended."""
        usage = answer.usage
        ended = answer.ended if answer.ended is not None else answer.started
        first = None if answer.replayed else answer.first
        rate = None
        if first is not None and usage is not None and usage.completion_tokens > 1 and ended > first:
            rate = (usage.completion_tokens - 1) / (ended - first)
        return cls(
            usage=usage,
            first=None if first is None else first - answer.started,
            seconds=ended - answer.started,
            rate=rate,
            worker=answer.worker,
            prefill_worker=answer.prefill_worker,
        )

    def line(self) -> str:
        """All of them in one line."""
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
