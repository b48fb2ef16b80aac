"""The services API (ADR-32), asked as `nats micro` asks it."""

from __future__ import annotations

import datetime as dt
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from inferbus.workers.bus.connection.bus import Bus
from inferbus.workers.bus.connection.message import Message
from inferbus.workers.bus.fleet.services import Endpoint, Service
from tests.broker.conftest import Connect
from tests.support.eventually import eventually

STARTED = dt.datetime(2026, 1, 2, 3, 4, 5, 678901, tzinfo=dt.UTC)
METADATA = {"model": "m", "role": "decode", "slots": "8"}


@pytest.fixture
async def service(bus: Bus) -> AsyncIterator[Service]:
    """One worker's."""
    endpoints = [
        Endpoint("chat", "infer.request.m.chat", queue="decode", metadata={"kind": "chat"}),
        Endpoint("jobs", "infer.jobs.m.>"),
    ]
    async with Service(
        bus,
        name="inferbus-decode",
        id="w1",
        version="0.1.0",
        description="Decodes.",
        metadata=METADATA,
        endpoints=endpoints,
        now=lambda: STARTED,
    ) as service:
        yield service


async def ask(connect: Connect, subject: str) -> Any:
    bus = await connect()
    return json.loads((await bus.request(subject)).data)


@pytest.mark.parametrize("suffix", ["", ".inferbus-decode", ".inferbus-decode.w1"])
async def test_ping(service: Service, connect: Connect, suffix: str) -> None:
    assert await ask(connect, f"$SRV.PING{suffix}") == {
        "type": "io.nats.micro.v1.ping_response",
        "name": "inferbus-decode",
        "id": "w1",
        "version": "0.1.0",
        "metadata": METADATA,
    }


async def test_info(service: Service, connect: Connect) -> None:
    assert await ask(connect, "$SRV.INFO.inferbus-decode.w1") == {
        "type": "io.nats.micro.v1.info_response",
        "name": "inferbus-decode",
        "id": "w1",
        "version": "0.1.0",
        "metadata": METADATA,
        "description": "Decodes.",
        "endpoints": [
            {
                "name": "chat",
                "subject": "infer.request.m.chat",
                "queue_group": "decode",
                "metadata": {"kind": "chat"},
            },
            {"name": "jobs", "subject": "infer.jobs.m.>", "queue_group": "", "metadata": {}},
        ],
    }


async def test_stats(service: Service, connect: Connect) -> None:
    chat = service.endpoints[0]
    chat.record(0.5)
    chat.record(0.25, "500:engine_failed")
    assert await ask(connect, "$SRV.STATS") == {
        "type": "io.nats.micro.v1.stats_response",
        "name": "inferbus-decode",
        "id": "w1",
        "version": "0.1.0",
        "metadata": METADATA,
        "started": "2026-01-02T03:04:05.678901Z",
        "endpoints": [
            {
                "name": "chat",
                "subject": "infer.request.m.chat",
                "queue_group": "decode",
                "num_requests": 2,
                "num_errors": 1,
                "last_error": "500:engine_failed",
                "processing_time": 750_000_000,
                "average_processing_time": 375_000_000,
                "data": {},
            },
            {
                "name": "jobs",
                "subject": "infer.jobs.m.>",
                "queue_group": "",
                "num_requests": 0,
                "num_errors": 0,
                "last_error": "",
                "processing_time": 0,
                "average_processing_time": 0,
                "data": {},
            },
        ],
    }


async def test_every_worker_answers_for_itself(service: Service, bus: Bus, connect: Connect) -> None:
    second = await connect()
    found: list[str] = []
    inbox = bus.inbox(lambda message: found.append(json.loads(message.data)["id"]))
    async with Service(second, name="inferbus-decode", id="w2", version="0.1.0"):
        bus.send("$SRV.PING.inferbus-decode", b"", reply=inbox.subject)
        await eventually(lambda: sorted(found) == ["w1", "w2"])


async def test_a_worker_that_left_answers_no_more(bus: Bus, connect: Connect) -> None:
    async with Service(bus, name="a", id="w1", version="0.1.0"):
        pass
    other = await connect()
    found: list[Message] = []
    inbox = other.inbox(found.append)
    other.send("$SRV.PING", b"", reply=inbox.subject)
    await eventually(lambda: found)
    assert found[0].status == "503"


@pytest.mark.parametrize("reply", ["$JS.API.STREAM.DELETE.INFER_JOBS", "infer.jobs.m.batch.o.chat", "other"])
async def test_nobody_can_make_a_worker_publish_elsewhere(
    service: Service, bus: Bus, connect: Connect, reply: str
) -> None:
    got: list[Message] = []
    other = await connect()
    await other.subscribe(reply, got.append)
    other.send("$SRV.INFO", b"", reply=reply)
    other.send("$SRV.INFO", b"")
    await other.flush()
    await ask(connect, "$SRV.PING")
    await other.flush()
    assert got == []
    assert bus.callback_errors == 0


async def test_the_requests_headers_are_not_sent_back(service: Service, connect: Connect) -> None:
    """nats-py's own services do."""
    bus = await connect()
    answer = await bus.request("$SRV.PING", headers={"Secret": "s"})
    assert dict(answer.headers) == {}


@pytest.mark.parametrize(
    ("name", "version"), [("a b", "0.1.0"), ("a.b", "0.1.0"), ("a", "0.1"), ("", "0.1.0")]
)
def test_names_and_versions_that_tools_would_refuse_are_refused(name: str, version: str) -> None:
    with pytest.raises(ValueError, match="service"):
        Service(None, name=name, id="w1", version=version)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="endpoint"):
        Endpoint("a.b", "s")


async def test_nats_py_reads_the_answers_as_its_own(service: Service, connect: Connect) -> None:
    """The closest to `nats micro` that a test has at hand: nats-py's own types of the same answers."""
    from nats.micro.service import ServiceInfo, ServicePing, ServiceStats

    for verb, kind in (("PING", ServicePing), ("INFO", ServiceInfo), ("STATS", ServiceStats)):
        parsed = kind.from_dict(await ask(connect, f"$SRV.{verb}"))
        assert parsed.id == "w1"
