"""Detects a connection that is dead although nats-py reports it as connected.

An unexpected exception ends nats-py's read loop unreported: the client stays
"connected" and receives nothing. So the server is pinged at intervals. Without
an answer the connection is made again; where that fails, the bus is closed, so
that the process can end with an error and be restarted.
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
"""Seconds between pings, and for an answer."""


class Watchdog:
    """Pings at intervals; calls `give_up` with a reason when the connection cannot be made again."""

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
            # Twice: one answer may be late because this process was busy.
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
            # A connection that was lost meanwhile is known to the client.
            return not self._client.is_connected
        return True

    async def _renew(self) -> None:
        self.interventions += 1
        log.error("bus.unresponsive", interval=self._interval)
        before = self._client.stats["reconnects"]
        await self._client.force_reconnect()
        # nats-py closes the old socket gracefully first, which never ends with a stopped peer.
        await asyncio.sleep(min(1.0, self._interval))
        if self._client.is_reconnecting and self._client.stats["reconnects"] == before:
            natspy.abort_socket(self._client)
