"""A cluster of three NATS servers."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

from inferbus.schemas.errors import BusUnavailable
from inferbus.workers.bus.connection.bus import Bus
from inferbus.workers.bus.jetstream.client import JetStream
from inferbus.workers.stack.local import free_ports
from inferbus.workers.stack.server import HOST, NatsServer
from tests.support.eventually import eventually

SERVERS = 3


@contextlib.asynccontextmanager
async def cluster(directory: Path, *, monitoring: bool = False) -> AsyncIterator[list[NatsServer]]:
    """Three servers that know each other; JetStream has no leader yet.

    Args:
        directory: Of theirs.
        monitoring: Open their monitoring ports.
    """
    ports = free_ports(SERVERS)
    routes = ", ".join(f'"nats-route://{HOST}:{port}"' for port in ports)
    # One route between two servers: several are still being made and dropped when streams get their copies.
    shared = f"name: c, pool_size: -1, routes: [{routes}]"
    servers = [
        NatsServer(
            directory / f"n{number}",
            sync_interval=None,
            monitoring=monitoring,
            extra=f'server_name: n{number}\ncluster {{ listen: "{HOST}:{port}", {shared} }}',
        )
        for number, port in enumerate(ports)
    ]
    async with contextlib.AsyncExitStack() as stack:
        for server in servers:
            await stack.enter_async_context(server)
        yield servers


async def elected(bus: Bus) -> None:
    """Returns once JetStream's leader answers, and every server of the cluster is one of its peers."""

    async def placed() -> bool:
        jetstream = JetStream(bus)
        config = {"name": "PROBE", "subjects": ["probe"], "num_replicas": SERVERS, "storage": "memory"}
        try:
            await jetstream.call("STREAM.CREATE.PROBE", config, timeout=0.5)
            await jetstream.call("STREAM.DELETE.PROBE")
        except BusUnavailable:
            return False
        return True

    await eventually(placed, within=20)
