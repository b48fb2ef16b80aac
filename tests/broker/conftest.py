"""A real nats-server for every test, and connections to it that are closed afterwards.

With INFERBUS_TEST_NATS_IMAGE that server is a container of this image with the configuration of compose.yaml;
tests that start or stop their server are skipped then. `make test-containers` runs a part of the suite so.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from inferbus.workers.bus.connection.bus import Bus
from inferbus.workers.bus.jetstream.provision import provision
from inferbus.workers.config import BusSettings, StreamSettings
from inferbus.workers.stack.processes import Child
from inferbus.workers.stack.server import NatsServer
from tests.support.containers import IMAGE, nats_container

Connect = Callable[..., Awaitable[Bus]]


class Contained(NatsServer):
    """A server in a container; a test that stops or starts its server is skipped."""

    async def start(self) -> None:
        pytest.skip("this test starts its server")

    async def stop(self, *, grace: float = 5.0) -> None:
        pytest.skip("this test stops its server")

    @property
    def child(self) -> Child:
        pytest.skip("this test signals its server")


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[NatsServer]:
    """Its own server; it does not sync, which only a power failure would show."""
    if os.environ.get(IMAGE):
        async with nats_container() as url:
            yield Contained(tmp_path, port=urlsplit(url).port or 0)
        return
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
