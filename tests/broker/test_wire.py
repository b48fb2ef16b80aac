"""Messages that are no text, and messages that the server forwards; published by a bare socket."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from inferbus.schemas import headers
from inferbus.workers.bus.connection.bus import Bus
from inferbus.workers.bus.connection.message import Message
from inferbus.workers.bus.jetstream.client import JetStream
from inferbus.workers.bus.jetstream.layout import CANCEL, DEAD, JOBS, RESULTS
from inferbus.workers.stack.server import NatsServer
from tests.support.eventually import eventually
from tests.support.fleet import fleet
from tests.support.raw import RawClient

TOKENS = b'{"token_ids": [1], "max_tokens": 3}'

NO_TEXT = {
    "no line break": b"NATS/1.0",
    "no text in the status line": b"NATS/1.0 \xff\xff\xff\r\n\r\n",
    "no text at all": b"\xff\x00\xfe",
}
"""Header blocks that nats-py cannot parse."""

NO_HEADERS = (b"NATS/1.0", b"\xff\x00\xfe")
"""Those that a stream keeps; it stores a status line without what follows `NATS/1.0`."""


@pytest.fixture
async def raw(server: NatsServer) -> AsyncIterator[RawClient]:
    client = await RawClient.connect(server.port)
    yield client
    await client.close()


@pytest.mark.parametrize("subject", [b"a.\xff", b"a.\x0b1", b"a.\x00", b"a.\x0c1", b"a.\xc2\x85"])
async def test_a_subject_that_is_no_text_is_dropped_and_reading_goes_on(
    bus: Bus, raw: RawClient, subject: bytes
) -> None:
    got: list[Message] = []
    await bus.subscribe("a.*", got.append)
    await raw.publish(subject, b"x")
    await raw.publish(b"a.b", b"good")
    await eventually(lambda: got)
    assert [message.data for message in got] == [b"good"]
    assert bus.undecodable == 1
    assert bus.reconnects == bus.errors == bus.callback_errors == 0


@pytest.mark.parametrize("block", NO_TEXT.values(), ids=list(NO_TEXT))
async def test_a_header_block_that_is_none_is_dropped_and_reading_goes_on(
    bus: Bus, raw: RawClient, block: bytes
) -> None:
    got: list[Message] = []
    await bus.subscribe("a", got.append)
    await raw.publish(b"a", b"x", block=block)
    await raw.publish(b"a", b"good", block=b"NATS/1.0\r\nA: b\r\n\r\n")
    await eventually(lambda: got)
    assert [(message.data, message.headers) for message in got] == [(b"good", {"A": "b"})]
    assert bus.reconnects == bus.errors == bus.callback_errors == 0


async def test_a_vertical_tab_in_a_subject_does_not_reach_another_subscription(
    bus: Bus, raw: RawClient
) -> None:
    question: list[Message] = []
    await bus.subscribe("question", question.append)
    await bus.subscribe("open.>", lambda _: None)
    asked = asyncio.ensure_future(bus.request("question", timeout=5))
    await eventually(lambda: question)
    base = question[0].reply
    # To nats-py: subject, white space, number of the subscription. The inboxes' is the first.
    for number in range(1, 5):
        await raw.publish(b"open." + base.encode() + b"\x0b%d" % number, b"forged")
    await raw.publish(base.encode(), b"genuine")
    assert (await asked).data == b"genuine"


async def test_a_status_header_of_the_sender_is_no_status_of_the_server(bus: Bus, raw: RawClient) -> None:
    got: list[Message] = []
    await bus.subscribe("a", got.append)
    await raw.publish(b"a", b"", block=b"NATS/1.0\r\nStatus: 503\r\n\r\n")
    await raw.publish(b"a", b"", block=b"NATS/1.0 503\r\n\r\n")
    await eventually(lambda: len(got) == 2)
    assert [message.status for message in got] == ["", "503"]
    assert [message.forwarded for message in got] == [False, True]
    assert got[0].headers == {"Status": "503"}


async def test_stored_status_headers_and_lines_hide_no_later_message(streams: Bus, raw: RawClient) -> None:
    """The server stores a status line without its status."""
    store = JetStream(streams)
    for block in (
        b"NATS/1.0\r\nStatus: 204\r\n\r\n",
        b"NATS/1.0 204 EOB\r\n\r\n",
        b"NATS/1.0 404\r\n\r\n",
        b"NATS/1.0 503\r\n\r\n",
        *NO_TEXT.values(),
    ):
        await raw.publish(b"infer.cancel.o.j", b"", block=block)
    await store.store("infer.cancel.o.j", b"")
    found = await store.read(CANCEL, "infer.cancel.o.j")
    assert [each.forwarded for each in found] == [False] * 8
    assert [each.undecodable is not None for each in found] == [False] * 4 + [True, False, True, False]


async def test_what_the_server_forwards_is_marked_live_and_stored(streams: Bus, raw: RawClient) -> None:
    live: list[Message] = []
    await streams.subscribe("infer.cancel.b.*", live.append)
    store = JetStream(streams)
    await raw.publish(b"infer.cancel.a.own")
    get = f"$JS.API.DIRECT.GET.{CANCEL}.infer.cancel.a.own"
    await raw.publish(get.encode(), b"", reply=b"infer.cancel.b.j")
    await eventually(lambda: live)
    assert live[0].forwarded
    assert not (await store.last(CANCEL, "infer.cancel.a.own")).forwarded  # type: ignore[union-attr]
    stored = await store.last(CANCEL, "infer.cancel.b.j")
    assert stored is not None
    assert stored.forwarded
    by_leader = await store.get(CANCEL, {"seq": stored.sequence})
    assert by_leader is not None
    assert by_leader.forwarded


async def test_a_job_that_is_no_text_is_buried_once_with_its_headers_escaped(
    server: NatsServer, bus: Bus, raw: RawClient, tmp_path: Path
) -> None:
    async with fleet(server, tmp_path) as workers:
        await workers.start("both")
        await _bury(JetStream(bus), raw)
        info = await JetStream(bus).call(f"CONSUMER.INFO.{JOBS}.scripted-batch")
        assert info["num_ack_pending"] == info["num_pending"] == 0


async def _bury(store: JetStream, raw: RawClient) -> None:
    await raw.publish(b"infer.jobs.scripted.batch.\xff.tokens", TOKENS)
    await raw.publish(b"infer.jobs.scripted.batch.e\x0bvil.tokens", TOKENS)
    for block in NO_HEADERS:
        await raw.publish(b"infer.jobs.scripted.batch.evil.tokens", TOKENS, block=block)
    sound = b"NATS/1.0\r\nInfer-Job-Id: g\r\n\r\n"
    await raw.publish(b"infer.jobs.scripted.batch.good.tokens", TOKENS, block=sound)

    async def settled() -> bool:
        letters = await store.read(DEAD, "infer.dead.>")
        return len(letters) == 4 and not await store.read(JOBS, "infer.jobs.>")

    await eventually(settled)
    letters = await store.read(DEAD, "infer.dead.>")
    assert {each.subject for each in letters} == {"infer.dead.scripted.unknown"}
    assert {each.data for each in letters} == {TOKENS}
    assert r"infer.jobs.scripted.batch.\xff.tokens" in {each.headers[headers.SUBJECT] for each in letters}
    raws = {each.headers[headers.RAW] for each in letters}
    assert raws == {"", *map(headers.escaped, NO_HEADERS)}
    assert await store.last(RESULTS, "infer.results.good.g") is not None


async def test_no_message_that_others_see_shows_where_a_worker_waits_for_the_servers_answers(
    server: NatsServer, bus: Bus, tmp_path: Path
) -> None:
    """Else a client has the server answer the worker: with an acknowledgement of its own, for example."""
    async with fleet(server, tmp_path) as workers:
        await workers.start("decode", "[[rules]]\nlength=100\n", client_gone_every=1)
        await workers.start("prefill")
        seen: list[Message] = []
        asked: list[Message] = []
        await bus.subscribe("infer.prefill.>", seen.append)
        await bus.subscribe("$JS.API.>", asked.append)
        inbox = bus.inbox(seen.append)
        bus.send("infer.request.scripted.tokens", TOKENS, {}, reply=inbox.subject)
        await eventually(lambda: any(headers.STATUS in message.headers for message in seen))
        await JetStream(bus).store("infer.jobs.scripted.batch.o.tokens", TOKENS, {headers.JOB_ID: "j"})
        await eventually(lambda: any("DIRECT.GET.INFER_RESULTS" in message.subject for message in asked))
        shown = {message.reply.rpartition(".")[0] for message in seen if message.reply}
        waiting = {
            message.reply.rpartition(".")[0] for message in asked if message.reply.startswith("infer.")
        }
        assert shown
        assert waiting
        assert not shown & waiting
        assert all(base.startswith("infer.inbox.") for base in shown | waiting)


async def test_a_reply_subject_in_a_workers_inbox_is_refused(
    server: NatsServer, bus: Bus, tmp_path: Path
) -> None:
    async with fleet(server, tmp_path) as workers:
        child = await workers.start("both", client_gone_every=1)
        got: list[Message] = []
        await bus.subscribe("infer.inbox.forged.>", got.append)
        for subject in ("infer.request.scripted.tokens", "infer.alive.live.x", "$SRV.PING"):
            bus.send(subject, TOKENS, reply="infer.inbox.forged.1")
        await eventually(lambda: workers.events(child, "services.not_answered"))
        assert workers.events(child, "request.unanswerable")
        assert workers.events(child, "alive.ignored")
        assert not got
