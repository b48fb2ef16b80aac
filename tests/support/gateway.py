"""A gateway in the test's own process, on a port of its own."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx

from inferbus.workers.config import BusSettings, GatewaySettings, Settings
from inferbus.workers.gateway.server import quiet, run


@asynccontextmanager
async def gateway(nats: str | BusSettings, **settings: Any) -> AsyncIterator[str]:
    """A gateway that listens; yields its URL.

    Args:
        nats: The server's URL, or how to connect.
        settings: Of the gateway.
    """
    quiet()
    listening: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    stop = asyncio.Event()
    given = Settings(
        bus=BusSettings(urls=(nats,)) if isinstance(nats, str) else nats,
        gateway=GatewaySettings(**{"listen": "127.0.0.1:0", "grace": 2.0, **settings}),
    )
    running = asyncio.create_task(run(given, stop, listening=listening.set_result))
    try:
        both: tuple[asyncio.Future[Any], ...] = (running, listening)
        await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        if running.done():
            await running
        yield listening.result()
    finally:
        stop.set()
        await running


@asynccontextmanager
async def caller(url: str, **headers: str) -> AsyncIterator[httpx.AsyncClient]:
    """An HTTP client for it."""
    async with httpx.AsyncClient(base_url=url, timeout=20, headers=headers, trust_env=False) as found:
        yield found


def events(text: str) -> list[Any]:
    """The objects of a whole stream of events, whose last one must be `[DONE]`."""
    data = [line.removeprefix("data: ") for line in text.split("\n") if line.startswith("data: ")]
    assert data
    assert data[-1] == "[DONE]"
    return [json.loads(each) for each in data[:-1]]
