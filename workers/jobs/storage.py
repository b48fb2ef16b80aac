"""Storing what must not be lost: results, dead letters, counts of attempts.

While NATS is away, or the stream has no room, a finished answer waits: computing it again would cost more
than keeping it. A worker that waits for room takes no more jobs, since their answers would have to wait too.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Final, TypeVar

import structlog

from inferbus.schemas.errors import BusUnavailable
from inferbus.workers.bus.errors import StreamFull

log = structlog.get_logger()

T = TypeVar("T")

OUTAGE: Final = 300.0
"""Seconds for which a finished answer waits for NATS to come back. It waits for room without end."""

FIRST_PAUSE: Final = 0.1
LONGEST_PAUSE: Final = 5.0


class Storage:
    """What one worker stores.

    Args:
        clock: Monotonic seconds.

    Attributes:
        full: Why answers wait for room; None: none does.
        has_room: Set while none does.
        has_no_room: Set while one does.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._waiting = 0
        self._abandoned = False
        self._changed: list[Callable[[], None]] = []
        self.full: str | None = None
        self.has_room = asyncio.Event()
        self.has_room.set()
        self.has_no_room = asyncio.Event()

    def on_change(self, listener: Callable[[], None]) -> None:
        """Calls `listener` when `full` changes."""
        self._changed.append(listener)

    def abandon(self) -> None:
        """Waits for room no more: this worker stops. What is not stored is delivered, and computed, again."""
        self._abandoned = True

    async def store(self, store: Callable[[], Awaitable[T]], *, subject: str) -> T:
        """Stores, and tries again while NATS is away or there is no room.

        Args:
            store: What to try.
            subject: For the log.

        Raises:
            BusUnavailable: NATS was away for `OUTAGE`, or the worker stops.
        """
        deadline = self._clock() + OUTAGE
        pause, waits = FIRST_PAUSE, False
        try:
            while True:
                try:
                    stored = await store()
                except StreamFull as error:
                    if self._abandoned:
                        raise
                    if not waits:
                        waits, self._waiting = True, self._waiting + 1
                        self._set(error.message)
                    deadline = self._clock() + OUTAGE
                except BusUnavailable as error:
                    if self._clock() + pause > deadline:
                        raise
                    log.warning("result.waiting", subject=subject, reason=error.message)
                else:
                    return stored
                await asyncio.sleep(pause)
                pause = min(pause * 2, LONGEST_PAUSE)
        finally:
            self._waiting -= waits
            if not self._waiting:
                self._set(None)

    def _set(self, reason: str | None) -> None:
        if (reason is None) == (self.full is None):
            return
        self.full = reason
        if reason is None:
            log.info("results.room_again")
            self.has_room.set()
            self.has_no_room.clear()
        else:
            log.error("results.full", reason=reason, consequence="no more jobs are taken")
            self.has_room.clear()
            self.has_no_room.set()
        for listener in self._changed:
            listener()
