"""Permits to run a request; a worker takes nothing that it has no slot for."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable


class Slots:
    """A fixed number of slots, some of them kept for live requests.

    A durable job can wait in its queue and a live request cannot, so jobs leave a share of the slots alone,
    and a live request may take any.

    Args:
        total: At least 1.
        live_share: Share of the slots that jobs leave alone; one slot always remains for them.
        changed: Called whenever the number of free slots did.

    Attributes:
        total: See above.
        busy: Slots in use.
        room: Set while there is a slot for a job.
        no_room: Set while there is none.
    """

    def __init__(self, total: int, *, live_share: float, changed: Callable[[], None] = lambda: None) -> None:
        self.total = total
        self.busy = 0
        self.changed = changed
        self.room = asyncio.Event()
        self.no_room = asyncio.Event()
        self._for_jobs = max(1, total - math.floor(total * live_share))
        self._set(0)

    @property
    def full(self) -> bool:
        """Whether even a live request finds no slot."""
        return self.busy >= self.total

    def take_live(self) -> bool:
        """Takes a slot for a live request, if there is one."""
        if self.full:
            return False
        self._set(self.busy + 1)
        return True

    async def take_job(self) -> None:
        """Takes a slot for a durable job as soon as there is one to spare."""
        while self.busy >= self._for_jobs:
            await self.room.wait()
        self._set(self.busy + 1)

    def free(self) -> None:
        """Gives a slot back."""
        self._set(self.busy - 1)

    def _set(self, busy: int) -> None:
        self.busy = busy
        gained, lost = (self.room, self.no_room) if busy < self._for_jobs else (self.no_room, self.room)
        gained.set()
        lost.clear()
        self.changed()
