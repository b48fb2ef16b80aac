"""SGLang's server, a worker of the role `both` and a pair, on the engines that the folder's tests share."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import NamedTuple

import httpx
import nats
import pytest
import pytest_asyncio
from nats.aio.client import Client

from inferbus.workers.stack.server import NatsServer
from tests.engine.parity.cases import MODEL
from tests.support.fleet import fleet as started
from tests.support.remote_engine import RemoteEngine
from tests.support.sglang_server import SGLangServer


class Sides(NamedTuple):
    """Who is asked: SGLang's server, one worker, and a pair of workers on a NATS server of their own."""

    http: httpx.AsyncClient
    both: Client
    pair: Client


@pytest_asyncio.fixture(scope="package", loop_scope="package")
async def sides(
    sglang_server: SGLangServer,
    fleet: dict[str, RemoteEngine],
    tmp_path_factory: pytest.TempPathFactory,
) -> AsyncIterator[Sides]:
    """All of them, ready."""
    async with AsyncExitStack() as stack:
        clients = []
        for roles in (("both",), ("prefill", "decode")):
            folder = tmp_path_factory.mktemp(roles[0])
            server = await stack.enter_async_context(NatsServer(folder / "nats", sync_interval=None))
            workers = await stack.enter_async_context(started(server, folder, model=MODEL))
            for role in roles:
                command = [sys.executable, "-m", "tests.support.engine_worker", role]
                child = await workers.spawn(role, [*command, str(fleet[role].log.parent)], slots=8)
                await workers.ready(child, within=60)
            clients.append(await nats.connect(server.url))
            stack.push_async_callback(clients[-1].close)
        http = await stack.enter_async_context(
            httpx.AsyncClient(
                base_url=sglang_server.url,
                timeout=60,
                trust_env=False,
                # It closes a connection after an error of its own.
                limits=httpx.Limits(max_keepalive_connections=0),
            )
        )
        yield Sides(http, *clients)
