"""The whole examination, in the order in which a set-up is built."""

from __future__ import annotations

from inferbus.schemas.errors import BusUnavailable
from inferbus.workers.bus.connection.bus import Bus
from inferbus.workers.bus.fleet.condition import examine as condition
from inferbus.workers.client import Client
from inferbus.workers.config import Settings
from inferbus.workers.doctor import clocks, connection, fleet, machine, permissions, storage, streams
from inferbus.workers.doctor.findings import Finding, fail, skip
from inferbus.workers.doctor.permissions import User


async def examine(settings: Settings, *, user: User = "client", owner: str = "default") -> list[Finding]:
    """Examines NATS, JetStream, the streams and the workers; for a worker, this machine too.

    Args:
        settings: As the client, worker or operator has them.
        user: What the connection's user is to be.
        owner: Whose jobs a client submits.
    """
    here = await machine.check() if user == "worker" else []
    try:
        inboxes = settings.bus.subjects.worker_inboxes if user == "worker" else None
        bus = await Bus.connect(settings.bus, name="inferbus doctor", inbox_prefix=inboxes)
    except BusUnavailable as error:
        return [*here, connection.refused(settings.bus, error)]
    try:
        return [*here, *await _connected(bus, settings, user, owner)]
    except BusUnavailable as error:
        return [*here, fail("nats", f"the examination was cut short: {error.message}", "try again")]
    finally:
        await bus.close()


async def _connected(bus: Bus, settings: Settings, user: User, owner: str) -> list[Finding]:
    found = [await connection.reached(bus), await permissions.check(bus, user, owner)]
    found += await storage.check(bus, settings)
    stored = await streams.check(bus, settings)
    found += [*stored, await clocks.check(bus)]
    try:
        workers = await Client(bus).workers()
    except BusUnavailable as error:
        return [*found, connection.payload(bus, []), skip("workers", error.message)]
    found += [connection.payload(bus, workers), *fleet.check(workers)]
    if any(each.level == "fail" for each in stored):
        return found  # Streams that are missing would be told twice.
    troubles = (await condition(bus, workers)).troubles
    return found + [fleet.trouble(each) for each in troubles]
