"""What a user of the client sees when workers and the server die under a job: nothing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from schemas.answers import TokenAnswer, TokenChunk
from tests.support.eventually import eventually
from tests.support.fleet import Fleet, fleet
from workers.client import Client, JobStream, Restarted
from workers.stack.server import NatsServer

pytestmark = pytest.mark.faults

SLOW = "[[rules]]\nlength = 60\ndelay = 0.03\n"
BODY = {"token_ids": [1, 2]}
EXPECTED = list(range(3, 63))


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[NatsServer]:
    async with NatsServer(tmp_path / "nats", sync_interval=None) as found:
        yield found


@pytest.fixture
async def workers(server: NatsServer, tmp_path: Path) -> AsyncIterator[Fleet]:
    async with fleet(server, tmp_path) as found:
        yield found


@pytest.fixture
async def client(server: NatsServer) -> AsyncIterator[Client]:
    async with Client.connect(server.url) as found:
        yield found


async def follow(stream: JobStream, seen: list[int], events: list[Any]) -> None:
    async for event in stream:
        events.append(event)
        if isinstance(event, TokenChunk):
            seen.extend(event.token_ids)


async def test_a_killed_worker_is_replaced_without_a_trace(client: Client, workers: Fleet) -> None:
    first = await workers.start("both", SLOW)
    job = await client.submit("tokens", "scripted", BODY)
    seen: list[int] = []
    events: list[Any] = []
    reading = asyncio.create_task(follow(client.stream(job), seen, events))
    await eventually(lambda: len(seen) > 5)
    first.kill()
    await workers.start("both", SLOW)
    async with asyncio.timeout(30):
        await reading
        result = await client.result(job)
    assert seen == EXPECTED
    assert not any(isinstance(event, Restarted) for event in events)
    assert [event.seq for event in events] == list(range(len(events)))
    assert isinstance(result.answer, TokenAnswer)
    assert result.answer.choices[0].token_ids == EXPECTED
    assert result.attempt == 2


async def test_a_server_that_dies_for_a_moment_costs_nothing(
    client: Client, workers: Fleet, server: NatsServer
) -> None:
    await workers.start("both", SLOW)
    job = await client.submit("tokens", "scripted", BODY)
    seen: list[int] = []
    events: list[Any] = []
    reading = asyncio.create_task(follow(client.stream(job), seen, events))
    await eventually(lambda: len(seen) > 5)
    await server.kill()
    await server.restart()
    async with asyncio.timeout(60):
        await reading
    assert seen == EXPECTED
    assert not any(isinstance(event, Restarted) for event in events)
