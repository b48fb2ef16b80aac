"""Notices a connection that only says it is one.

nats-py's read loop ends without a word on an unexpected exception: the client
stays "connected" and nothing arrives any more (facts 4.2, trial B4). So the
server is asked for a sign of life at intervals. Without one the connection is
made anew; where that is not possible either, the bus is declared closed, and
the process can end with an error and be started again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final

import nats.errors
import structlog

from inferbus.workers.bus.connection import natspy

log = structlog.get_logger()

INTERVAL: Final = 5.0
"""Seconds between questions, and for an answer."""


class Watchdog:
    """Asks at intervals; `give_up` is called with a reason when nothing helps."""

    def __init__(
        self,
        client: natspy.GuardedClient,
        give_up: Callable[[str], Awaitable[None]],
        *,
        interval: float = INTERVAL,
    ) -> None:
        self._client = client
        self._give_up = give_up
        self._interval = interval
        self.interventions = 0

    async def run(self) -> None:
        """Until the client is closed."""
        while not self._client.is_closed:
            await asyncio.sleep(self._interval)
            if natspy.reconnecting_died(self._client):
                await self._give_up("the client stopped reconnecting")
                return
            # Twice, since one answer may be late because this process had no time to read it.
            if self._client.is_connected and not (await self._alive() or await self._alive()):
                await self._renew()

    async def _alive(self) -> bool:
        if natspy.read_loop_died(self._client):
            return False
        try:
            async with asyncio.timeout(self._interval):
                await self._client.rtt(timeout=self._interval)
        except nats.errors.ConnectionClosedError:
            return True
        except (TimeoutError, nats.errors.Error, OSError):
            # Where the connection was lost meanwhile, the client knows by itself.
            return not self._client.is_connected
        return True

    async def _renew(self) -> None:
        self.interventions += 1
        log.error("bus.unresponsive", interval=self._interval)
        before = self._client.stats["reconnects"]
        await self._client.force_reconnect()
        # The old socket is closed in good order first, which a stopped peer never lets happen.
        await asyncio.sleep(min(1.0, self._interval))
        if self._client.is_reconnecting and self._client.stats["reconnects"] == before:
            natspy.abort_socket(self._client)
