"""Three servers, and the way of a fleet from one copy of its streams to three and back."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, Literal

import pytest

from inferbus.schemas.errors import BusUnavailable
from inferbus.workers.bus.connection.bus import Bus
from inferbus.workers.bus.errors import ProvisionError
from inferbus.workers.bus.jetstream import layout
from inferbus.workers.bus.jetstream.client import JetStream
from inferbus.workers.bus.jetstream.entrance import entrance
from inferbus.workers.bus.jetstream.provision import provision
from inferbus.workers.bus.queue.consumers import job_queue
from inferbus.workers.client.operator import Operator
from inferbus.workers.config import BusSettings, Settings, StreamSettings, WorkerSettings
from inferbus.workers.stack.server import NatsServer
from tests.support.cluster import cluster, elected
from tests.support.eventually import eventually

ONE, THREE = StreamSettings(replicas=1), StreamSettings(replicas=3)
CHUNK = "infer.stream.o.j"


@pytest.fixture
async def servers(tmp_path: Path) -> AsyncIterator[list[NatsServer]]:
    async with cluster(tmp_path) as servers:
        yield servers


@pytest.fixture
async def bus(servers: list[NatsServer]) -> AsyncIterator[Bus]:
    async with AsyncExitStack() as stack:
        settings = BusSettings(urls=tuple(each.url for each in servers), connect_timeout=2.0)
        bus = await Bus.connect(settings, name="test")
        stack.push_async_callback(bus.close)
        await elected(bus)
        yield bus


async def copied(bus: Bus, copies: int) -> dict[str, dict[str, Any]]:
    """The streams' configurations, once every copy holds everything."""
    configs = {}
    for each in layout.CONTRACT:

        async def current(name: str = each) -> dict[str, Any] | None:
            try:
                info = await JetStream(bus).call(f"STREAM.INFO.{name}", timeout=1.0)
            except BusUnavailable:
                return None
            others = info["cluster"].get("replicas") or []
            complete = len(others) == copies - 1 and all(other["current"] for other in others)
            return info["config"] if complete and info["cluster"].get("leader") else None

        configs[each] = await eventually(current, within=30, what=f"{each} has {copies} copies")
    return configs


async def store(bus: Bus, number: int) -> None:
    """A job, a result and a dead letter."""
    jetstream = JetStream(bus)
    await jetstream.store(bus.subjects.job("m", "batch", "o", "tokens"), f"job {number}".encode())
    await jetstream.store(bus.subjects.result("o", f"r{number}"), f"result {number}".encode(), expect=0)
    await jetstream.store(bus.subjects.dead("m", "tokens"), f"letter {number}".encode())


async def stored(bus: Bus, stream: str, family: Literal["results", "dead", "stream"]) -> list[bytes]:
    return [each.data for each in await JetStream(bus).read(stream, bus.subjects.all(family))]


async def test_a_fleet_goes_from_one_copy_to_three_and_back_without_losing_jobs_or_results(bus: Bus) -> None:
    await provision(bus, ONE, model="m")
    one = await copied(bus, 1)
    await store(bus, 1)
    await JetStream(bus).store(CHUNK, b"chunk")
    with pytest.raises(ProvisionError, match="`inferbus streams --adopt --streams-replicas 3`"):
        await provision(bus, THREE)

    told: list[str] = []
    await Operator(bus).adopt(Settings(streams=THREE), report=told.append)
    assert "INFER_JOBS: num_replicas from 1 to 3" in told
    assert any(each.startswith("INFER_STREAM: made anew, without its messages") for each in told)
    three = await copied(bus, 3)
    assert {three[each]["storage"] for each in (layout.STREAM, layout.WORKERS)} == {"memory"}
    for name in (layout.RESULTS, layout.DEAD):
        assert entrance(three[name]) == entrance(one[name])
    await provision(bus, THREE)
    await provision(bus, ONE)
    queue = await job_queue(bus, "m", WorkerSettings())
    await store(bus, 2)
    await JetStream(bus).store(CHUNK, b"chunk")

    told.clear()
    await Operator(bus).adopt(Settings(streams=ONE), report=told.append)
    assert told == []
    await Operator(bus).adopt(Settings(streams=ONE), lower_replicas=True, report=told.append)
    assert "INFER_RESULTS: num_replicas from 3 to 1" in told
    again = await copied(bus, 1)
    assert again[layout.STREAM]["persist_mode"] == "async"
    await provision(bus, ONE)
    await store(bus, 3)
    assert await stored(bus, layout.RESULTS, "results") == [b"result 1", b"result 2", b"result 3"]
    assert await stored(bus, layout.DEAD, "dead") == [b"letter 1", b"letter 2", b"letter 3"]
    jobs = []
    for _ in range(3):
        delivery = await queue.take()
        jobs.append(delivery.message.data)
        await delivery.ack()
    assert jobs == [b"job 1", b"job 2", b"job 3"]
    await queue.stop()


async def test_chunks_are_kept_where_there_are_too_few_servers_for_more_copies(bus: Bus) -> None:
    await provision(bus, ONE)
    await JetStream(bus).store(CHUNK, b"chunk")
    five = Settings(streams=StreamSettings(replicas=5))
    told: list[str] = []
    with pytest.raises(BusUnavailable, match=r"INFER_JOBS: .*no suitable peers"):
        await Operator(bus).adopt(five, report=told.append)
    assert told == []
    assert await stored(bus, layout.STREAM, "stream") == [b"chunk"]
