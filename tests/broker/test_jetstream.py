"""Storing and looking up in real streams."""

from __future__ import annotations

import asyncio
import datetime as dt
from pathlib import Path

import pytest
from nats.js.api import StreamConfig

from inferbus.schemas.errors import BusUnavailable
from inferbus.workers.bus.connection.bus import Bus
from inferbus.workers.bus.errors import ApiError, StreamFull
from inferbus.workers.bus.interface import PubAck
from inferbus.workers.bus.jetstream import client
from inferbus.workers.bus.jetstream.client import JetStream
from inferbus.workers.config import BusSettings
from inferbus.workers.stack.server import NatsServer
from tests.broker.conftest import Connect
from tests.support.eventually import eventually


async def make(bus: Bus, **config: object) -> None:
    await bus.js.add_stream(
        StreamConfig(**({"name": "S", "subjects": ["s.>"], "allow_direct": True} | config))
    )


async def test_a_stored_message_is_found_again_with_its_headers_and_time(bus: Bus) -> None:
    await make(bus)
    before = dt.datetime.now(dt.UTC)
    ack = await JetStream(bus).store("s.a", b"data", {"Infer-Job-Id": "j"})
    assert ack == PubAck(stream="S", sequence=1)
    found = await JetStream(bus).last("S", "s.a")
    assert found is not None
    assert (found.subject, found.data, found.sequence) == ("s.a", b"data", ack.sequence)
    assert found.headers["Infer-Job-Id"] == "j"
    assert set(found.headers) == {"Infer-Job-Id", "Nats-Msg-Id"}
    assert before - dt.timedelta(seconds=5) < found.time < dt.datetime.now(dt.UTC) + dt.timedelta(seconds=5)


async def test_a_message_with_an_empty_body_is_found_as_such(bus: Bus) -> None:
    """End marks have no body; neither have the server's own answers."""
    await make(bus)
    await JetStream(bus).store("s.a", b"", {"Infer-Status": "ok"})
    found = await JetStream(bus).last("S", "s.a")
    assert found is not None
    assert found.headers["Infer-Status"] == "ok"
    assert [each.data for each in await JetStream(bus).read("S", "s.a")] == [b""]


@pytest.mark.parametrize("direct", [True, False])
async def test_looking_up_works_with_and_without_direct_access(bus: Bus, direct: bool) -> None:
    await make(bus, allow_direct=direct)
    for number in range(3):
        await JetStream(bus).store("s.a", b"%d" % number, {"K": "v"})
        await JetStream(bus).store("s.b", b"other")
    last = await JetStream(bus).last("S", "s.a")
    assert last is not None
    assert (last.data, last.headers["K"]) == (b"2", "v")
    found = await JetStream(bus).read("S", "s.a")
    assert [each.data for each in found] == [b"0", b"1", b"2"]
    assert [each.sequence for each in found] == [1, 3, 5]
    assert found[0].headers["K"] == "v"
    assert await JetStream(bus).last("S", "s.none") is None
    assert await JetStream(bus).read("S", "s.none") == []


async def test_reading_goes_on_over_pages(bus: Bus, monkeypatch: pytest.MonkeyPatch) -> None:
    await make(bus)
    monkeypatch.setattr(client, "PAGE", 7)
    for number in range(21):
        bus.send("s.a", b"%d" % number)
    await bus.flush()
    await eventually(lambda: JetStream(bus).last("S", "s.a"))
    assert [int(each.data) for each in await JetStream(bus).read("S", "s.a")] == list(range(21))


async def test_of_many_who_store_once_one_succeeds(bus: Bus, connect: Connect) -> None:
    await make(bus)
    other = await connect()
    acks = await asyncio.gather(
        *(
            JetStream(each).store("s.a", b"%d" % number, expect=0)
            for number, each in enumerate([bus, other] * 10)
        )
    )
    assert sum(ack is not None for ack in acks) == 1
    assert len(await JetStream(bus).read("S", "s.a")) == 1


async def test_storing_once_with_the_message_id_of_another_owner_stores_nothing(bus: Bus) -> None:
    await make(bus)
    assert await JetStream(bus).store("s.a", b"first", {"Nats-Msg-Id": "j"}, expect=0)
    assert await JetStream(bus).store("s.a", b"second", {"Nats-Msg-Id": "j"}, expect=0) is None


async def test_a_second_submission_of_one_id_returns_the_first_sequence(bus: Bus) -> None:
    await make(bus)
    acks = [
        await JetStream(bus).store("s.a", b"1", headers)
        for headers in ({"Nats-Msg-Id": "j"}, {"Nats-Msg-Id": "j"}, {}, {})
    ]
    assert [(ack.sequence, ack.duplicate) for ack in acks] == [(1, False), (1, True), (2, False), (3, False)]


async def test_at_its_limit_a_stream_refuses_and_nothing_is_lost(bus: Bus) -> None:
    await make(bus, max_msgs=10, discard="new")
    for number in range(10):
        await JetStream(bus).store("s.a", b"%d" % number)
    for _ in range(10):
        with pytest.raises(StreamFull, match="full") as refused:
            await JetStream(bus).store("s.a", b"more")
        assert refused.value.err_code == 10077
    assert [int(each.data) for each in await JetStream(bus).read("S", "s.a")] == list(range(10))


async def test_storing_is_tried_again_while_no_stream_answers(bus: Bus) -> None:
    """ADR-22: a leader may be under election."""
    before = bus.writer.sent
    storing = asyncio.create_task(JetStream(bus).store("s.a", b"data"))
    await eventually(lambda: bus.writer.sent > before)
    await make(bus)
    assert (await storing).sequence == 1


async def test_no_stream_takes_it(bus: Bus) -> None:
    with pytest.raises(BusUnavailable, match=r"no stream takes s\.a"):
        await JetStream(bus).store("s.a", b"data")


async def test_a_stream_that_is_not_there_is_told(bus: Bus) -> None:
    for looking in (JetStream(bus).last("S", "s.a"), JetStream(bus).read("S", "s.a")):
        with pytest.raises(ApiError, match="stream not found"):
            await looking


async def test_something_else_than_a_stream_answers(bus: Bus) -> None:
    await bus.subscribe("s.a", lambda message: bus.send(message.reply, b"hello"))
    with pytest.raises(BusUnavailable, match="something else"):
        await JetStream(bus).store("s.a", b"data")


async def test_jetstream_is_off(tmp_path: Path) -> None:
    limits = 'accounts { A { users: [ { user: "u", password: "p" } ] } }'
    async with NatsServer(tmp_path, extra=limits) as server:
        bus = await Bus.connect(BusSettings(urls=(server.url,), user="u", password="p"), name="test")
        with pytest.raises(BusUnavailable, match="JetStream does not answer: is it enabled"):
            await JetStream(bus).call("INFO")
        await bus.close()


@pytest.mark.faults
async def test_what_was_stored_before_a_crash_is_not_stored_twice_after_it(
    bus: Bus, server: NatsServer
) -> None:
    """The same message id lets a caller try again who does not know what became of the first try."""
    await make(bus)
    stored: list[int] = []

    async def submit(number: int) -> None:
        while True:
            try:
                ack = await JetStream(bus).store(
                    f"s.{number}", b"data", {"Nats-Msg-Id": f"id-{number}"}, timeout=0.5
                )
            except BusUnavailable:
                continue
            return stored.append(ack.sequence)

    async def restart() -> None:
        await server.kill()
        await server.restart()

    submitting = [asyncio.create_task(submit(number)) for number in range(300)]
    await eventually(lambda: stored)
    await restart()
    await asyncio.wait_for(asyncio.gather(*submitting), 30)
    assert len(await JetStream(bus).read("S", "s.>")) == 300
