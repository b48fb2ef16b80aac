"""Trying again: attempts that failed, and what cannot be stored while NATS is away."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from typing import Final, TypeVar

import msgspec
import structlog

from inferbus.schemas.errors import BusUnavailable

log = structlog.get_logger()

T = TypeVar("T")

OUTAGE: Final = 300.0
"""Seconds for which a finished answer waits for NATS to come back."""

FIRST_PAUSE: Final = 0.1
LONGEST_PAUSE: Final = 5.0


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
        base = min(self.first * 2.0 ** (attempt - 1), self.longest)
        share = (uniform or random.SystemRandom()).uniform(-self.jitter, self.jitter)
        return base * (1.0 + share)

    def last(self, attempt: int) -> bool:
        """Whether no attempt follows this one."""
        return attempt >= self.attempts


async def outlast_outage(
    store: Callable[[], Awaitable[T]], *, subject: str, clock: Callable[[], float] = time.monotonic
) -> T:
    """Stores, and tries again while NATS is away: a finished answer is not thrown away for that.

    Args:
        store: What to try.
        subject: For the log.
        clock: Monotonic seconds.

    Raises:
        BusUnavailable: Not within `OUTAGE`.
    """
    deadline = clock() + OUTAGE
    pause = FIRST_PAUSE
    while True:
        try:
            return await store()
        except BusUnavailable as error:
            if clock() + pause > deadline:
                raise
            log.warning("result.waiting", subject=subject, reason=error.message)
            await asyncio.sleep(pause)
            pause = min(pause * 2, LONGEST_PAUSE)
