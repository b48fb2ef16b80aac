"""Permits to run a request; a worker takes only what it has a permit for."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from types import TracebackType


class Permit:
    """One request's permit; given back when its block ends, or by `release`."""

    def __init__(self, release: Callable[[], None]) -> None:
        self._release = release
        self._held = True

    def release(self) -> None:
        """Gives it back; harmless when that was done."""
        if self._held:
            self._held = False
            self._release()

    def __enter__(self) -> Permit:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


class Slots:
    """A fixed number of slots, some of them kept for live requests.

    A durable job can wait in its queue and a live request cannot, so jobs leave a share of the slots alone,
    and a live request may take any.

    Args:
        total: At least 1.
        live_share: Share of the slots that jobs leave alone; one slot always remains for them.

    Attributes:
        total: See above.
        busy: Slots in use.
        room: Set while there is a slot for a job.
        no_room: Set while there is none.
    """

    def __init__(self, total: int, *, live_share: float) -> None:
        self.total = total
        self.busy = 0
        self.room = asyncio.Event()
        self.no_room = asyncio.Event()
        self._for_jobs = max(1, total - math.floor(total * live_share))
        self._callbacks: list[Callable[[], None]] = []
        self._set(0)

    def on_change(self, callback: Callable[[], None]) -> None:
        """Calls back whenever a slot was taken or freed."""
        self._callbacks.append(callback)

    @property
    def full(self) -> bool:
        """Whether even a live request finds no slot."""
        return self.busy >= self.total

    def admit_live(self) -> Permit | None:
        """A permit for a live request, if there is a slot."""
        return None if self.full else self._admit()

    async def admit_job(self) -> Permit:
        """A permit for a durable job, as soon as there is a slot to spare."""
        while self.busy >= self._for_jobs:
            await self.room.wait()
        return self._admit()

    def _admit(self) -> Permit:
        self._set(self.busy + 1)
        return Permit(lambda: self._set(self.busy - 1))

    def _set(self, busy: int) -> None:
        self.busy = busy
        gained, lost = (self.room, self.no_room) if busy < self._for_jobs else (self.no_room, self.room)
        gained.set()
        lost.clear()
        for callback in self._callbacks:
            callback()
