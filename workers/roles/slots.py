"""Permits to run a request; a worker takes nothing that it has no slot for."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable


class Slots:
    """A fixed number of slots, some of them kept for live requests.

    A durable job can wait in its queue and a live request cannot, so jobs leave
    a share of the slots alone, and a live request may take any.

    Args:
        total: At least 1.
        live_share: Share of the slots that jobs leave alone; one slot always remains for them.
        changed: Called whenever the number of free slots did.
    """

    def __init__(self, total: int, *, live_share: float, changed: Callable[[], None] = lambda: None) -> None:
        self.total = total
        self.busy = 0
        self._for_jobs = max(1, total - math.floor(total * live_share))
        self.changed = changed
        self._waiting: list[asyncio.Future[None]] = []

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
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.append(waiter)
            try:
                await waiter
            finally:
                if waiter in self._waiting:
                    self._waiting.remove(waiter)
        self._set(self.busy + 1)

    def free(self) -> None:
        """Gives a slot back."""
        self._set(self.busy - 1)

    def _set(self, busy: int) -> None:
        self.busy = busy
        if busy < self._for_jobs:
            for waiter in self._waiting:
                if not waiter.done():
                    waiter.set_result(None)
        self.changed()
