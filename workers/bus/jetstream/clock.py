"""The clock of the server, as far as a worker can tell it.

Jobs expire by when the server stored them. A worker whose own clock is wrong would end them early, late or
never. So the server's clock is read, and continued by monotonic time.
"""

from __future__ import annotations

import asyncio
import datetime as dt
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Final

import structlog

from inferbus.schemas.errors import BusUnavailable
from inferbus.workers.bus.connection.bus import Bus
from inferbus.workers.bus.jetstream.browse import server_time
from inferbus.workers.bus.jetstream.client import JetStream
from inferbus.workers.bus.jetstream.layout import JOBS

log = structlog.get_logger()

INTERVAL: Final = 30.0
"""Seconds between measurements: clocks drift, are set, and stop while a machine is suspended."""

SAMPLES: Final = 3
"""Readings of one measurement. The quickest answer counts: half of its round trip is the largest error."""

SKEWED: Final = 2.0
"""Seconds between the two clocks from which an operator is warned."""


class ServerClock:
    """The server's clock.

    Args:
        read: Asks the server for its time; raises `BusUnavailable`.
        wall: This machine's own clock, aware.
        monotonic: Seconds.

    Attributes:
        skew: Seconds by which this machine's clock is ahead of the server's; 0 before the first measurement.
    """

    def __init__(
        self,
        read: Callable[[], Awaitable[dt.datetime]],
        *,
        wall: Callable[[], dt.datetime] = lambda: dt.datetime.now(dt.UTC),
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._read = read
        self._wall = wall
        self._monotonic = monotonic
        # The server's time at zero of the monotonic clock.
        self._origin: dt.datetime | None = None
        self._skewed = False
        self.skew = 0.0

    def now(self) -> dt.datetime:
        """The server's time; this machine's own before the first measurement."""
        if self._origin is None:
            return self._wall()
        return self._origin + dt.timedelta(seconds=self._monotonic())

    async def measure(self) -> None:
        """Reads the server's clock, and warns where this machine's differs.

        Raises:
            BusUnavailable: The server did not answer.
        """
        self._origin = min([await self._sample() for _ in range(SAMPLES)])[1]
        self.skew = (self._wall() - self.now()).total_seconds()
        if (skewed := abs(self.skew) >= SKEWED) != self._skewed:
            self._skewed = skewed
            change = log.warning if skewed else log.info
            change("clock.skewed" if skewed else "clock.right", ahead=round(self.skew, 3))

    async def follow(self) -> None:
        """Measures again and again, until it is cancelled."""
        while True:
            await asyncio.sleep(INTERVAL)
            try:
                await self.measure()
            except BusUnavailable as error:
                log.debug("clock.not_measured", reason=error.message)

    async def _sample(self) -> tuple[float, dt.datetime]:
        """One reading: its round trip in seconds, and the server's time at zero of the monotonic clock."""
        asked = self._monotonic()
        told = await self._read()
        answered = self._monotonic()
        return answered - asked, told - dt.timedelta(seconds=(asked + answered) / 2)


@asynccontextmanager
async def following(bus: Bus) -> AsyncIterator[ServerClock]:
    """The clock that stamps jobs, followed while the block runs.

    It is read from the stream of jobs: in a cluster, the server that leads that stream stamps them.

    Raises:
        BusUnavailable: The server did not answer, or the stream is not there.
    """
    jetstream = JetStream(bus)

    async def read() -> dt.datetime:
        return server_time(await jetstream.call(f"STREAM.INFO.{JOBS}"))

    clock = ServerClock(read)
    await clock.measure()
    task = asyncio.create_task(clock.follow(), name="server-clock")
    try:
        yield clock
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
