"""The guarded connection, each guard against the fault that it was made for."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import uvloop

from inferbus.schemas.errors import BusUnavailable, InvalidSubject, PayloadTooLarge
from inferbus.workers.bus.connection import natspy
from inferbus.workers.bus.connection.bus import Bus
from inferbus.workers.bus.connection.login import Login
from inferbus.workers.bus.connection.message import Message
from inferbus.workers.bus.connection.writer import LIMIT
from inferbus.workers.bus.errors import NoResponders, NotPermitted
from inferbus.workers.bus.jetstream.client import JetStream
from inferbus.workers.config import BusSettings
from inferbus.workers.stack.server import NatsServer
from tests.broker.conftest import Connect
from tests.support.eventually import eventually

BAD_SUBJECTS = {
    "line-break": "x\r\nPUB jobs.a 0\r\n\r\n",
    "line-feed": "x\ny",
    "star": "a.*",
    "rest": "_INBOX.>",
    "empty-token": "a..b",
    "empty": "",
    "dot-first": ".a",
    "dot-last": "a.",
    "space": "a b",
    "tab": "a\tb",
    "nul": "a\0b",
    "not-ascii": "a.ü",
    "too-long": "a" * 5000,
}


async def test_what_is_sent_arrives_in_order_with_headers_and_reply(bus: Bus) -> None:
    got: list[Message] = []
    await bus.subscribe("a.*", got.append)
    bus.send("a.1", b"one", {"Infer-Job-Id": "j"}, reply="b.c")
    bus.send("a.2", b"")
    await bus.flush()
    await eventually(lambda: len(got) == 2)
    assert got == [Message("a.1", b"one", {"Infer-Job-Id": "j"}, "b.c"), Message("a.2", b"", {}, "")]


async def test_a_message_over_the_limit_is_refused_at_once_and_the_connection_lives(bus: Bus) -> None:
    with pytest.raises(PayloadTooLarge) as refused:
        bus.send("a", b"x" * (bus.max_payload + 1))
    assert str(bus.max_payload + 1) in refused.value.message
    await bus.flush()
    assert bus.connected


async def test_headers_count_towards_the_limit(bus: Bus) -> None:
    """nats-py checks the body alone; the server then ends the connection for good."""
    with pytest.raises(PayloadTooLarge):
        bus.send("a", b"x" * (bus.max_payload - 10), {"Infer-Job-Id": "j" * 100})
    with pytest.raises(PayloadTooLarge):
        await JetStream(bus).store("a", b"x" * (bus.max_payload - 10))
    await bus.flush()
    assert bus.connected


async def test_the_largest_message_allowed_arrives(bus: Bus) -> None:
    got: list[Message] = []
    await bus.subscribe("a", got.append)
    block = len(b"NATS/1.0\r\nK: v\r\n\r\n")
    bus.send("a", b"x" * bus.max_payload)
    bus.send("a", b"x" * (bus.max_payload - block), {"K": "v"})
    await bus.flush()
    await eventually(lambda: len(got) == 2)


@pytest.mark.parametrize("subject", BAD_SUBJECTS.values(), ids=BAD_SUBJECTS.keys())
async def test_nothing_is_published_to_a_subject_that_is_not_one(
    bus: Bus, connect: Connect, subject: str
) -> None:
    """Neither as a subject nor as a reply subject; servers accept wildcards and empty tokens."""
    everything: list[Message] = []
    observer = await connect()
    await observer.subscribe(">", everything.append)
    with pytest.raises(InvalidSubject):
        bus.send(subject, b"data")
    if subject:
        with pytest.raises(InvalidSubject):
            bus.send("fine", b"data", reply=subject)
    with pytest.raises(InvalidSubject):
        await bus.request(subject)
    await bus.flush()
    await observer.flush()
    assert everything == []
    assert bus.connected


async def test_line_breaks_in_headers_cannot_start_a_command(bus: Bus) -> None:
    got: list[Message] = []
    await bus.subscribe("a", got.append)
    bus.send("a", b"data", {"K": "v\r\nPUB b 0\r\n\r\n"})
    with pytest.raises(InvalidSubject):
        bus.send("a", b"data", {"K\r\nPUB b 0\r\n\r\n": "v"})
    await bus.flush()
    await eventually(lambda: got)
    assert "\r" not in got[0].headers["K"]
    assert bus.connected


async def test_a_task_that_sends_all_the_time_can_be_cancelled(bus: Bus) -> None:
    async def stream() -> None:
        while True:
            for _ in range(100):
                bus.send("a.b", b"x" * 1000)
            await bus.ready()
            await asyncio.sleep(0)

    for _ in range(30):
        task = asyncio.create_task(stream())
        await asyncio.sleep(0.005)
        task.cancel()
        await asyncio.wait({task}, timeout=0.5)
        assert task.cancelled()


async def test_a_dead_read_loop_is_noticed_and_the_connection_made_anew(connect: Connect) -> None:
    bus = await connect(watchdog=0.5)
    got: list[Message] = []
    await bus.subscribe("a", got.append)

    async def broken(*_: Any) -> None:
        raise RuntimeError("as an exception from a callback would do")

    parser: Any = bus.nc._ps
    parse, parser.parse = parser.parse, broken
    bus.send("a", b"lost")
    await eventually(lambda: natspy.read_loop_died(bus.nc))
    parser.parse = parse
    assert bus.nc.is_connected  # It says so.
    await eventually(lambda: bus.reconnects == 1)
    await bus.until_connected()
    bus.send("a", b"found")
    await eventually(lambda: [message.data for message in got] == [b"found"])
    assert bus.watchdog.interventions == 1


async def test_an_answer_to_a_flush_that_was_given_up_does_not_end_the_read_loop(bus: Bus) -> None:
    for _ in range(20):
        flush = asyncio.create_task(bus.nc.flush())
        await asyncio.sleep(0)
        flush.cancel()
        await asyncio.wait({flush})
    await bus.flush()
    assert not natspy.read_loop_died(bus.nc)


async def test_a_callback_that_raises_is_counted_and_the_next_message_still_arrives(bus: Bus) -> None:
    got: list[bytes] = []

    def callback(message: Message) -> None:
        got.append(message.data)
        if message.data == b"1":
            raise ValueError("a defect")

    await bus.subscribe("a", callback)
    bus.send("a", b"1")
    bus.send("a", b"2")
    await eventually(lambda: got == [b"1", b"2"])
    assert bus.callback_errors == 1


async def test_a_listener_that_raises_does_not_keep_the_connection_from_coming_back(
    bus: Bus, server: NatsServer
) -> None:
    def listener(connected: bool) -> None:
        raise ValueError("a defect")

    bus.on_change(listener)
    await server.restart()
    await eventually(lambda: bus.reconnects == 1 and bus.connected)
    assert bus.callback_errors == 2


@pytest.mark.faults
async def test_it_reconnects_however_long_the_server_is_away(bus: Bus, server: NatsServer) -> None:
    states: list[bool] = []
    got: list[Message] = []
    bus.on_change(states.append)
    await bus.subscribe("a", got.append)
    await server.kill()
    await eventually(lambda: not bus.connected)
    bus.send("a", b"sent while away")
    with pytest.raises(BusUnavailable, match="NATS is away"):
        await bus.request("a", timeout=0.2)
    for _ in range(3):
        # Tries fail meanwhile, at least three of them.
        tries = bus.errors
        await eventually(lambda tries=tries: bus.errors > tries)
    assert not bus.closed.is_set()
    await server.restart()
    await eventually(lambda: [message.data for message in got] == [b"sent while away"])
    assert states == [False, True]
    assert bus.connected


@pytest.mark.faults
async def test_a_stopped_server_is_noticed_and_used_again_when_it_goes_on(
    connect: Connect, server: NatsServer
) -> None:
    """A peer that is there but says nothing: nats-py's own pings take 40 s to notice."""
    bus = await connect(watchdog=0.5)
    os.kill(server.child.pid, signal.SIGSTOP)
    try:
        for _ in range(2000):
            bus.send("a", b"x" * 10_000)
        await eventually(lambda: not bus.connected)
    finally:
        os.kill(server.child.pid, signal.SIGCONT)
    await eventually(lambda: bus.connected)
    await bus.flush()


async def test_a_message_that_finds_nobody_is_told_by_its_subject(bus: Bus) -> None:
    gone: list[str] = []
    probe = bus.probe_inbox(gone.append)
    await bus.subscribe("here", lambda message: None)
    bus.send("here", b"chunk", reply=probe.subject)
    bus.send("_INBOX.dead.1", b"chunk", {"K": "v"}, reply=probe.subject)
    await bus.flush()
    await eventually(lambda: gone == ["_INBOX.dead.1"])


async def test_a_closed_inbox_hears_no_more(bus: Bus) -> None:
    got: list[Message] = []
    inbox = bus.inbox(got.append)
    bus.send(inbox.subject, b"1")
    await eventually(lambda: len(got) == 1)
    inbox.close()
    bus.send(inbox.subject, b"2")
    await bus.flush()
    await bus.flush()
    assert len(got) == 1


async def test_a_request_gets_its_answer_and_leaves_nothing_behind(bus: Bus) -> None:
    await bus.subscribe("ask", lambda message: bus.send(message.reply, b"answer"), queue="q")
    before = bus.open_inboxes
    assert (await bus.request("ask", b"question")).data == b"answer"
    with pytest.raises(NoResponders):
        await bus.request("nobody")
    assert bus.open_inboxes == before


async def test_a_fatal_error_of_the_server_closes_the_bus_and_says_why(bus: Bus) -> None:
    """nats-py never reconnects after one of these; the process has to end and be started again."""
    await bus.nc.publish("a", b"x" * bus.nc.max_payload, headers={"K": "v" * 100})
    await asyncio.wait_for(bus.closed.wait(), 5)
    assert "payload" in (bus.failure or "")
    assert not bus.connected


async def test_nobody_answers() -> None:
    with pytest.raises(BusUnavailable, match=r"no NATS server at nats://127\.0\.0\.1:1: .*"):
        await Bus.connect(BusSettings(urls=("nats://127.0.0.1:1",)), name="test")


async def test_somebody_else_answers() -> None:
    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    listener = await asyncio.start_server(silent, "127.0.0.1", 0)
    port = listener.sockets[0].getsockname()[1]
    async with listener:
        with pytest.raises(BusUnavailable, match="did not answer within"):
            await Bus.connect(
                BusSettings(urls=(f"nats://127.0.0.1:{port}",), connect_timeout=0.3), name="test"
            )


async def test_a_message_that_the_server_sends_after_an_unsubscription_arrives() -> None:
    """A real server does so once in a thousand crossings; a job that came so would wait for the ack wait."""

    async def late(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b'INFO {"server_id":"S","version":"2.15.0","headers":true,"max_payload":1048576}\r\n')
        wanted = {}
        owed = b""
        while line := await reader.readline():
            match line.split():
                case [b"SUB", subject, sid]:
                    wanted[sid] = subject
                case [b"UNSUB", sid]:
                    owed = b"MSG %b %b 4\r\nlate\r\n" % (wanted[sid], sid)
                case [b"PING"]:
                    writer.write(b"PONG\r\n" + owed)
                    owed = b""
        writer.close()

    listener = await asyncio.start_server(late, "127.0.0.1", 0)
    port = listener.sockets[0].getsockname()[1]
    async with listener:
        bus = await Bus.connect(BusSettings(urls=(f"nats://127.0.0.1:{port}",)), name="test")
        try:
            arrived: asyncio.Queue[Message] = asyncio.Queue()
            subscription = await bus.subscribe("wanted", arrived.put_nowait)
            await subscription.unsubscribe()
            assert (await asyncio.wait_for(arrived.get(), 5)).data == b"late"
        finally:
            await bus.close()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "refuses these credentials"),
        ({"user": "u", "password": "wrong"}, "refuses these credentials"),
        ({"user": "u", "password": "p", "tls": True}, "TLS is asked for"),
    ],
)
async def test_a_server_that_refuses_is_told_apart(
    tmp_path: Path, settings: dict[str, Any], message: str
) -> None:
    async with NatsServer(tmp_path, extra='authorization { user: "u", password: "p" }') as server:
        url = server.url.replace("nats://", "tls://") if settings.pop("tls", False) else server.url
        with pytest.raises(BusUnavailable, match=message) as refused:
            await Bus.connect(BusSettings(urls=(url,), **settings), name="test")
        assert "\n" not in refused.value.message
        assert "wrong" not in refused.value.message


async def test_one_server_of_several_is_enough(server: NatsServer) -> None:
    bus = await Bus.connect(BusSettings(urls=("nats://127.0.0.1:1", server.url)), name="test")
    await bus.flush()
    await bus.close()


async def test_a_credentials_file_without_credentials_is_refused(server: NatsServer, tmp_path: Path) -> None:
    """nats-py would read it for ever."""
    (tmp_path / "creds").write_text("nothing\n")
    with pytest.raises(BusUnavailable, match="holds no user JWT"):
        await Bus.connect(BusSettings(urls=(server.url,), creds=tmp_path / "creds"), name="test")


async def test_a_missing_permission_is_told_with_its_subject(tmp_path: Path) -> None:
    users = """authorization { users: [ { user: "u", password: "p", permissions: {
        publish: { deny: ["infer.cancel.>"] }, subscribe: { deny: ["secret.>"] } } } ] }"""
    async with NatsServer(tmp_path, extra=users) as server:
        bus = await Bus.connect(BusSettings(urls=(server.url,), user="u", password="p"), name="test")
        with pytest.raises(NotPermitted, match=r"publish to infer\.cancel\.o\.J"):
            await JetStream(bus).store("infer.cancel.o.J", b"")
        with pytest.raises(NotPermitted, match=r"subscribe to secret\.a"):
            await bus.subscribe("secret.a", lambda message: None)
        assert bus.connected
        await bus.close()


async def test_an_inbox_prefix_that_is_not_permitted_ends_the_start(tmp_path: Path) -> None:
    users = """authorization { users: [ { user: "u", password: "p", permissions: {
        subscribe: { allow: ["_INBOX.tenant.>"] } } } ] }"""
    async with NatsServer(tmp_path, extra=users) as server:
        with pytest.raises(NotPermitted, match="_INBOX"):
            await Bus.connect(BusSettings(urls=(server.url,), user="u", password="p"), name="test")
        bus = await Bus.connect(
            BusSettings(urls=(server.url,), user="u", password="p", inbox_prefix="_INBOX.tenant"), name="test"
        )
        with pytest.raises(NoResponders):
            await bus.request("nobody")
        await bus.close()


async def test_flush_returns_when_the_server_has_everything(bus: Bus, connect: Connect) -> None:
    got: list[Message] = []
    other = await connect()
    await other.subscribe("a", got.append)
    for _ in range(20_000):
        bus.send("a", b"x" * 100)
    await bus.flush()
    await other.flush()
    await eventually(lambda: len(got) == 20_000)


@pytest.mark.faults
async def test_senders_wait_while_the_server_takes_nothing(connect: Connect, server: NatsServer) -> None:
    bus = await connect(watchdog=30)
    os.kill(server.child.pid, signal.SIGSTOP)
    try:
        while not bus.congested:
            bus.send("a", b"x" * 100_000)
            await asyncio.sleep(0)
        waiting = asyncio.create_task(bus.ready())
        done, _ = await asyncio.wait({waiting}, timeout=0.2)
        assert not done
    finally:
        os.kill(server.child.pid, signal.SIGCONT)
    await asyncio.wait_for(waiting, 5)
    await bus.flush()
    assert bus.writer.dropped == 0


@pytest.mark.faults
async def test_beyond_its_limit_the_queue_drops_and_counts(bus: Bus, server: NatsServer) -> None:
    got: list[Message] = []
    await bus.subscribe("a", got.append)
    await server.kill()
    await eventually(lambda: not bus.connected)
    fits = LIMIT // 1_000_000
    for number in range(fits + 5):
        bus.send("a", b"%04d" % number + b"x" * 999_996)
    # Frames are a little longer than their bodies.
    assert bus.writer.dropped in (5, 6)
    await server.restart()
    kept = fits + 5 - bus.writer.dropped
    await eventually(lambda: len(got) == kept)
    assert [int(message.data[:4]) for message in got] == list(range(kept))


async def test_leaving_a_queue_group_loses_no_message(bus: Bus, connect: Connect) -> None:
    got: list[int] = []
    other = await connect()
    members = [
        await other.subscribe("a", lambda message: got.append(int(message.data)), queue="q") for _ in range(2)
    ]
    sender = await connect()
    for number in range(5000):
        sender.send("a", b"%d" % number)
        if number == 2500:
            await sender.flush()
            leaving = asyncio.create_task(members[0].unsubscribe())
        if number % 100 == 0:
            await asyncio.sleep(0)
    await leaving
    await sender.flush()
    await eventually(lambda: len(got) == 5000)
    assert sorted(got) == list(range(5000))


@pytest.mark.faults
async def test_what_was_unsubscribed_while_the_server_restarted_does_not_come_back(
    bus: Bus, server: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """nats-py makes it anew at the reconnection; as a member of a queue group it would swallow requests."""
    end_interest = natspy.end_interest

    async def interrupted(client: Any, sub: Any, flush: Any) -> bool:
        async def restarted() -> None:
            await server.kill()
            await eventually(lambda: not bus.connected)
            await server.restart()
            await flush()

        return await end_interest(client, sub, restarted)

    subscription = await bus.subscribe("wanted", lambda _: None, queue="workers")
    monkeypatch.setattr(natspy, "end_interest", interrupted)
    monkeypatch.setattr("inferbus.workers.bus.connection.subscription.TIMEOUT", 30.0)
    await subscription.unsubscribe()
    with pytest.raises(NoResponders):
        await bus.request("wanted")


@pytest.mark.faults
async def test_what_was_unsubscribed_while_away_does_not_come_back(bus: Bus, server: NatsServer) -> None:
    got: list[Message] = []
    left = await bus.subscribe("a", got.append)
    kept = await bus.subscribe("b", got.append)
    await server.kill()
    await eventually(lambda: not bus.connected)
    await left.unsubscribe()
    await left.unsubscribe()
    await server.restart()
    await bus.until_connected()
    bus.send("a", b"")
    bus.send(kept.subject, b"")
    await eventually(lambda: got)
    await bus.flush()
    assert [message.subject for message in got] == ["b"]


async def test_closing_sends_what_is_queued_and_may_be_repeated(bus: Bus, connect: Connect) -> None:
    got: list[Message] = []
    other = await connect()
    await other.subscribe("a", got.append)
    for _ in range(1000):
        bus.send("a", b"x")
    await asyncio.gather(bus.close(), bus.close())
    assert bus.closed.is_set()
    assert bus.failure is None
    await eventually(lambda: len(got) == 1000)


@pytest.mark.faults
async def test_closing_does_not_wait_for_a_server_that_is_gone(bus: Bus, server: NatsServer) -> None:
    await server.kill()
    await eventually(lambda: not bus.connected)
    bus.send("a", b"never")
    await asyncio.wait_for(bus.close(), 5)


@pytest.mark.faults
async def test_what_another_server_would_refuse_is_dropped_and_the_connection_lives(
    bus: Bus, server: NatsServer, tmp_path: Path
) -> None:
    """After a restart with a smaller limit, one queued message over it would close the client for good."""
    got: list[Message] = []
    await bus.subscribe("a", got.append)
    await server.stop()
    await eventually(lambda: not bus.connected)
    bus.send("a", b"x" * 100_000)
    bus.send("a", b"small")
    async with NatsServer(tmp_path / "smaller", port=server.port, max_payload=10_000):
        await eventually(lambda: [message.data for message in got] == [b"small"])
        assert bus.writer.dropped == 1
        with pytest.raises(PayloadTooLarge):
            bus.send("a", b"x" * 10_000)
        await bus.close()


async def test_with_a_nats_py_that_cannot_write_batches_everything_still_works(
    connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(natspy, "can_write_batches", lambda client: False)
    bus = await connect()
    got: list[Message] = []
    await bus.subscribe("a", got.append)
    for number in range(1000):
        bus.send("a", b"%d" % number, {"K": "v"})
    await bus.flush()
    await eventually(lambda: len(got) == 1000)
    assert [int(message.data) for message in got] == list(range(1000))


def test_closing_what_has_lost_its_server_with_messages_unsent_is_no_error(tmp_path: Path) -> None:
    """On uvloop, as in a worker: a write to a transport that is closed raises there."""

    async def lose_and_close() -> None:
        async with NatsServer(tmp_path, sync_interval=None) as server:
            client = natspy.GuardedClient(Login(BusSettings()))
            await client.connect(server.url, reconnect_time_wait=0.1)
            await server.kill()
            await eventually(lambda: client.is_reconnecting)
            await client.publish("a", b"unsent")
            await client.close()
            assert client.is_closed

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(lose_and_close())
