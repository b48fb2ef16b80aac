"""A real nats-server for every test, and connections to it that are closed afterwards."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from inferbus.workers.bus.connection.bus import Bus
from inferbus.workers.bus.jetstream.provision import provision
from inferbus.workers.config import BusSettings, StreamSettings
from inferbus.workers.stack.server import NatsServer

Connect = Callable[..., Awaitable[Bus]]


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[NatsServer]:
    """Its own server; it does not sync, which only a power failure would show."""
    async with NatsServer(tmp_path / "nats", sync_interval=None) as server:
        yield server


@pytest.fixture
async def connect(server: NatsServer) -> AsyncIterator[Connect]:
    """Opens buses to the test's server."""
    async with AsyncExitStack() as stack:

        async def connect(*, watchdog: float = 5.0, **settings: Any) -> Bus:
            given: dict[str, Any] = {"urls": (server.url,), "connect_timeout": 2.0} | settings
            bus = await Bus.connect(BusSettings(**given), name="test", watchdog=watchdog)
            stack.push_async_callback(bus.close)
            return bus

        yield connect


@pytest.fixture
async def bus(connect: Connect) -> Bus:
    """A connection."""
    return await connect()


@pytest.fixture
async def streams(bus: Bus) -> Bus:
    """A connection to a server that has the contract's streams, and takes jobs of the model `m`."""
    await provision(bus, StreamSettings(), model="m")
    return bus
