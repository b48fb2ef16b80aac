"""Each owner's share of the stored results.

The stream refuses what does not fit, so one owner with many results would keep everybody's jobs from ending.
An owner's oldest results are removed beyond a number. JetStream has no limit for subjects with wildcards, so
workers look: after every twentieth of that number that they stored themselves.
"""

from __future__ import annotations

from collections import Counter
from typing import Final

import structlog

from inferbus.schemas.errors import BusUnavailable
from inferbus.workers.bus.connection.bus import Bus
from inferbus.workers.bus.jetstream import layout
from inferbus.workers.bus.jetstream.client import JetStream

log = structlog.get_logger()

LOOKS: Final = 20


class ResultShares:
    """Counts the results that this worker stored, and keeps owners within their share.

    Args:
        bus: The connection.
        most: Results kept of one owner; 0: all.
    """

    def __init__(self, bus: Bus, most: int) -> None:
        self._jetstream = JetStream(bus)
        self._subjects = bus.subjects
        self._most = most
        self._stored: Counter[str] = Counter()

    def due(self, owner: str) -> bool:
        """Counts one more result of an owner; whether it is time to look."""
        if not self._most:
            return False
        self._stored[owner] += 1
        if self._stored[owner] < max(1, self._most // LOOKS):
            return False
        del self._stored[owner]
        return True

    async def enforce(self, owner: str) -> None:
        """Removes an owner's oldest results, as far as there are too many; a failure is logged."""
        subject = self._subjects.results_of(owner)
        try:
            first, further = await self._jetstream.page(layout.RESULTS, subject, batch=1)
            if len(first) + further <= self._most:
                return
            purged = await self._jetstream.purge(layout.RESULTS, subject, keep=self._most)
        except BusUnavailable as error:
            log.warning("results.not_bounded", owner=owner, reason=error.message)
        else:
            log.info("results.removed", owner=owner, count=purged)
