"""This machine's clock, compared with the server's."""

from __future__ import annotations

import datetime as dt

from inferbus.schemas.errors import BusUnavailable
from inferbus.workers.bus.connection.bus import Bus
from inferbus.workers.bus.jetstream.browse import server_time, stream_info
from inferbus.workers.bus.jetstream.clock import SKEWED, ServerClock
from inferbus.workers.bus.jetstream.layout import JOBS
from inferbus.workers.doctor.findings import Finding, ok, skip, warn


async def check(bus: Bus) -> Finding:
    """Deadlines follow the server's clock."""

    async def read() -> dt.datetime:
        return server_time(await stream_info(bus, JOBS))

    clock = ServerClock(read)
    try:
        await clock.measure()
    except BusUnavailable as error:
        return skip("clock", error.message)
    return judged(clock.skew)


def judged(skew: float) -> Finding:
    """What a difference means; seconds by which this machine is ahead."""
    found = f"{abs(skew):.3f} s {'ahead of' if skew > 0 else 'behind'} the server's"
    if abs(skew) < SKEWED:
        return ok("clock", found)
    return warn("clock", found, "set the wrong one of the two (NTP); deadlines follow the server's clock")
