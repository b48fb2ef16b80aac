"""A server that may be killed, workers that may be killed, and somebody who asks."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from inferbus.workers.client import Client
from inferbus.workers.stack.server import NatsServer
from tests.support.fleet import Fleet, fleet


@pytest.fixture
async def server(tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[NatsServer]:
    """On a port of its own; a test may set more by `indirect` parameters."""
    more = getattr(request, "param", {})
    async with NatsServer(tmp_path / "nats", sync_interval=None, **more) as found:
        yield found


@pytest.fixture
async def workers(server: NatsServer, tmp_path: Path) -> AsyncIterator[Fleet]:
    async with fleet(server, tmp_path) as found:
        yield found


@pytest.fixture
async def client(server: NatsServer) -> AsyncIterator[Client]:
    async with Client.connect(server.url) as found:
        yield found
