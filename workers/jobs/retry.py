"""Trying jobs again whose attempt failed."""

from __future__ import annotations

import random

import msgspec


class RetryPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """How often and how soon a job is tried again.

    Attributes:
        attempts: For one job; `beginnings` counts them.
        first: Seconds before the second attempt; a plain nak would come back within a millisecond and
            burn all attempts in one short outage.
        longest: Most seconds before any attempt.
        jitter: Share of the delay that is random.
    """

    attempts: int = 5
    first: float = 1.0
    longest: float = 60.0
    jitter: float = 0.25

    def delay(self, attempt: int, *, uniform: random.Random | None = None) -> float:
        """Seconds to wait after attempt number `attempt` failed; doubles with every attempt."""
        base = min(self.first * 2.0 ** min(attempt - 1, 64), self.longest)
        share = (uniform or random.SystemRandom()).uniform(-self.jitter, self.jitter)
        return base * (1.0 + share)

    def last(self, attempt: int) -> bool:
        """Whether no attempt follows this one."""
        return attempt >= self.attempts
