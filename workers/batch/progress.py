"""How a batch stands, in words."""

from __future__ import annotations

import time
from collections.abc import Callable

from inferbus.workers.batch.bundling import Pace
from inferbus.workers.batch.state import Record


class Speed:
    """Lines and tokens a second, over the last half minute.

    Args:
        clock: Monotonic seconds.
    """

    SPAN = 30.0

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._seen: list[tuple[float, int, int]] = []

    def see(self, record: Record) -> tuple[float, float]:
        """Notes where a batch is now; returns both rates."""
        now = self._clock()
        if not self._seen or now - self._seen[-1][0] >= 1.0:
            self._seen.append((now, record.counts.ended, record.usage.output_tokens))
        self._seen = [each for each in self._seen if now - each[0] <= self.SPAN] or self._seen[-1:]
        first, lines, tokens = self._seen[0]
        if now - first < 1.0:
            return 0.0, 0.0
        seconds = now - first
        return (record.counts.ended - lines) / seconds, (record.usage.output_tokens - tokens) / seconds


def describe(record: Record, pace: Pace | None, submitted: int | None, rates: tuple[float, float]) -> str:
    """One line: what is done, how fast, and when it will be over."""
    total, counts = record.source.lines, record.counts
    parts = [f"{counts.ended}/{total} done"]
    if counts.errored:
        parts.append(f"{counts.errored} failed")
    if counts.cancelled or counts.expired:
        parts.append(f"{counts.cancelled + counts.expired} not run")
    if submitted is not None:
        parts.append(f"{submitted} submitted")
    if pace is not None:
        parts.append(f"{pace.workers} worker{'' if pace.workers == 1 else 's'}")
    lines, tokens = rates
    if lines:
        parts += [f"{lines:.1f} lines/s", f"{tokens:.0f} tokens/s"]
    if record.usage.input_tokens:
        parts.append(f"{record.usage.cached_tokens / record.usage.input_tokens:.0%} cached")
    left = total - counts.ended
    if lines and left:
        parts.append(f"{_span(left / lines)} left")
    return " · ".join(parts)


def _span(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}"
