"""The secret entrances of worker-written streams, on a real server."""

from __future__ import annotations

import asyncio
import json

import pytest

from inferbus.workers.bus.connection.bus import Bus
from inferbus.workers.bus.connection.message import Message
from inferbus.workers.bus.errors import NoResponders, ProvisionError
from inferbus.workers.bus.jetstream import layout
from inferbus.workers.bus.jetstream.client import JetStream
from inferbus.workers.bus.jetstream.entrance import entrance
from inferbus.workers.bus.jetstream.provision import provision
from inferbus.workers.config import StreamSettings
from tests.broker.conftest import Connect
from tests.support.eventually import eventually

RESULT = "infer.results.b.j"
JOB = "infer.jobs.m.batch.a.chat"


async def stored(bus: Bus, stream: str) -> int:
    return int((await JetStream(bus).call(f"STREAM.INFO.{stream}"))["state"]["messages"])


async def make_open(bus: Bus) -> None:
    """The streams as they were before they had entrances."""
    for stream, families in ((layout.RESULTS, ("results", "attempts")), (layout.DEAD, ("dead",))):
        found = next(
            each for each in layout.stream_configs(bus.subjects, StreamSettings()) if each["name"] == stream
        )
        plain = {name: found[name] for name in found if name not in ("subject_transform", "republish")}
        plain["subjects"] = [f"infer.{family}.>" for family in families]
        await JetStream(bus).call(f"STREAM.CREATE.{stream}", plain)


@pytest.mark.parametrize(
    ("target", "stream"),
    [(RESULT, layout.RESULTS), ("infer.attempts.b.j", layout.RESULTS), ("infer.dead.m.chat", layout.DEAD)],
)
async def test_the_server_stores_nothing_there_on_behalf_of_a_client(
    streams: Bus, target: str, stream: str
) -> None:
    """Neither a JetStream acknowledgement, nor the answer to a direct get, nor a message of the client's."""
    heard: list[Message] = []
    await streams.subscribe(target, heard.append)
    before = await JetStream(streams).store(JOB, b"{}")
    streams.send("infer.cancel.a.j", b"", reply=target)
    streams.send(
        f"$JS.API.DIRECT.GET.{layout.JOBS}", json.dumps({"seq": before.sequence}).encode(), reply=target
    )
    streams.send(target, b"{}", {"Infer-Status": "ok", "Infer-Submission": "1"})
    await eventually(lambda: len(heard) == 3)
    assert await stored(streams, stream) == 0


async def test_workers_store_on_the_subjects_that_readers_know(streams: Bus) -> None:
    worker = JetStream(streams)
    heard: list[Message] = []
    await streams.subscribe(RESULT, heard.append)
    first = await worker.store(RESULT, b"one", {"Nats-Msg-Id": "m"}, expect=0)
    assert first is not None
    assert await worker.store(RESULT, b"two", expect=0) is None
    assert await worker.store(RESULT, b"two", expect=first.sequence) is not None
    assert (await worker.store(RESULT, b"one", {"Nats-Msg-Id": "m"})).duplicate
    assert [each.data for each in await worker.read(layout.RESULTS, "infer.results.b.>")] == [b"one", b"two"]
    newest = await worker.last(layout.RESULTS, RESULT)
    assert newest is not None
    assert (newest.subject, newest.data) == (RESULT, b"two")
    await eventually(
        lambda: [each.data for each in heard] == [b"one", b"two"], what="subscribers hear results"
    )
    worker.send("infer.attempts.b.j", b"")
    await worker.flush()
    assert await eventually(lambda: worker.last(layout.RESULTS, "infer.attempts.b.j")) is not None


async def test_the_key_is_kept_and_one_for_all_workers(streams: Bus, connect: Connect) -> None:
    others = [await connect() for _ in range(4)]
    await asyncio.gather(*(provision(bus, StreamSettings(), adopt=True) for bus in others))
    for number, bus in enumerate((streams, *others)):
        await JetStream(bus).store(f"infer.results.b.{number}", b"")
    assert await stored(streams, layout.RESULTS) == 5


async def test_a_stream_that_was_made_anew_has_another_key_which_workers_find(streams: Bus) -> None:
    worker = JetStream(streams)
    await worker.store(RESULT, b"old")
    await worker.call(f"STREAM.DELETE.{layout.RESULTS}")
    with pytest.raises(NoResponders, match="no stream takes"):
        await worker.store(RESULT, b"lost")
    await provision(streams, StreamSettings())
    await worker.store(RESULT, b"new")
    assert [each.data for each in await worker.read(layout.RESULTS, RESULT)] == [b"new"]


async def test_streams_without_an_entrance_are_refused_and_adopted_with_what_they_hold(bus: Bus) -> None:
    await make_open(bus)
    await JetStream(bus).store(RESULT, b"old")
    with pytest.raises(ProvisionError, match=r"INFER_RESULTS: .*infer\.in\.\*\.results\.>.*"):
        await provision(bus, StreamSettings())
    await provision(bus, StreamSettings(), adopt=True)
    await provision(bus, StreamSettings())
    await JetStream(bus).store(RESULT, b"new")
    found = await JetStream(bus).read(layout.RESULTS, RESULT)
    assert [each.data for each in found] == [b"old", b"new"]


async def test_a_second_way_in_is_refused_and_closed_and_the_key_is_never_told(streams: Bus) -> None:
    config = (await JetStream(streams).call(f"STREAM.INFO.{layout.DEAD}"))["config"]
    found = entrance(config)
    assert found is not None
    wider = config | {"subjects": [*config["subjects"], "infer.dead.>"], "republish": None}
    await JetStream(streams).call(f"STREAM.UPDATE.{layout.DEAD}", wider)
    with pytest.raises(ProvisionError, match=r"infer\.in\.\*\.dead\.>, infer\.dead\.>, wanted") as refused:
        await provision(streams, StreamSettings())
    assert found.source.split(".")[2] not in refused.value.message
    await provision(streams, StreamSettings(), adopt=True)
    assert (await JetStream(streams).call(f"STREAM.INFO.{layout.DEAD}"))["config"]["subjects"] == config[
        "subjects"
    ]
