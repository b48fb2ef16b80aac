"""Pulling jobs from a real server: who gets which job, when, and how often."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Any

import msgspec
import pytest
from structlog.testing import capture_logs

from inferbus.schemas.errors import BusUnavailable, Draining
from inferbus.schemas.subjects import CLASSES, Subjects
from inferbus.workers.bus.connection.bus import Bus
from inferbus.workers.bus.connection.message import Message
from inferbus.workers.bus.durations import nanoseconds
from inferbus.workers.bus.jetstream import layout
from inferbus.workers.bus.jetstream.client import JetStream
from inferbus.workers.bus.queue.consumers import job_queue
from inferbus.workers.bus.queue.delivery import AckSubject, NatsDelivery
from inferbus.workers.bus.queue.job_queue import JobQueue
from inferbus.workers.bus.queue.pull_requests import EXPIRES
from inferbus.workers.config import WorkerSettings
from inferbus.workers.stack.server import NatsServer
from tests.broker.conftest import Connect
from tests.support.eventually import eventually

ACK_WAIT = 1.2

Queues = Callable[..., Awaitable[JobQueue]]


@pytest.fixture
async def queues(streams: Bus) -> AsyncIterator[Queues]:
    """Makes queues of the model `m`, and stops them afterwards."""
    async with AsyncExitStack() as stack:

        async def make(bus: Bus = streams, **settings: Any) -> JobQueue:
            queue = await job_queue(bus, "m", WorkerSettings(**({"ack_wait": ACK_WAIT} | settings)))
            stack.push_async_callback(queue.stop)
            return queue

        yield make


async def submit(bus: Bus, *names: str, job_class: Any = "batch") -> None:
    for name in names:
        await JetStream(bus).store(bus.subjects.job("m", job_class, "o", "chat"), name.encode())


def class_of(delivery: NatsDelivery) -> str:
    return Subjects().parse_job(delivery.message.subject).job_class


async def state(bus: Bus, job_class: Any = "batch") -> dict[str, Any]:
    return await JetStream(bus).call(f"CONSUMER.INFO.{layout.JOBS}.{layout.durable('m', job_class)}")


async def messages(bus: Bus) -> int:
    return int((await JetStream(bus).call(f"STREAM.INFO.{layout.JOBS}"))["state"]["messages"])


async def test_a_job_comes_as_submitted(streams: Bus, queues: Queues) -> None:
    queue = await queues()
    ack = await JetStream(streams).store(
        streams.subjects.job("m", "batch", "o", "chat"), b"body", {"Infer-Job-Id": "j", "Nats-Msg-Id": "i"}
    )
    delivery = await queue.take()
    message = delivery.message
    assert (message.subject, message.data) == ("infer.jobs.m.batch.o.chat", b"body")
    assert (message.sequence, delivery.attempt) == (ack.sequence, 1)
    assert message.headers["Infer-Job-Id"] == "j"
    stored = await JetStream(streams).last(layout.JOBS, message.subject)
    assert stored is not None
    assert abs((stored.time - message.time).total_seconds()) < 1e-3
    await delivery.ack()
    assert await messages(streams) == 0


async def test_a_job_that_is_submitted_later_reaches_a_taker_that_waits(streams: Bus, queues: Queues) -> None:
    queue = await queues()
    for job_class in ("interactive", "batch"):
        taking = asyncio.create_task(queue.take())
        await eventually(lambda job_class=job_class: _waits(streams, job_class))
        await submit(streams, "1", job_class=job_class)
        delivery = await asyncio.wait_for(taking, 1)
        await delivery.ack()


async def _waits(bus: Bus, job_class: str) -> bool:
    return bool((await state(bus, job_class))["num_waiting"])


async def test_a_long_job_runs_once(streams: Bus, queues: Queues) -> None:
    """Three times the ack wait: heartbeats go out at a third of it or less."""
    queue, other = await queues(), await queues()
    await submit(streams, "long")
    delivery = await queue.take()
    second = asyncio.create_task(other.take())
    done, _ = await asyncio.wait({second}, timeout=3 * ACK_WAIT)
    assert not done
    assert queue.heartbeats.sent >= 8
    await delivery.ack()
    assert (await state(streams))["num_redelivered"] == 0
    second.cancel()


async def test_a_shortened_ack_wait_is_followed_and_nothing_runs_twice(streams: Bus, queues: Queues) -> None:
    queue = await queues(ack_wait=60)
    await submit(streams, "long")
    delivery = await queue.take()
    second = asyncio.create_task(queue.take())
    consumer = (await state(streams))["config"] | {"ack_wait": nanoseconds(ACK_WAIT)}
    body = {"stream_name": layout.JOBS, "config": consumer, "action": "update"}
    await JetStream(streams).call(f"CONSUMER.CREATE.{layout.JOBS}.{consumer['durable_name']}", body)
    await eventually(lambda: queue.heartbeats.ack_wait == ACK_WAIT)
    redelivered = (await state(streams))["delivered"]["consumer_seq"]
    done, _ = await asyncio.wait({second}, timeout=3 * ACK_WAIT)
    assert not done
    assert (await state(streams))["delivered"]["consumer_seq"] == redelivered
    assert not delivery.stale
    await delivery.ack()
    assert await messages(streams) == 0
    second.cancel()


async def test_a_job_that_is_put_back_comes_again_to_the_same_worker_at_once(
    streams: Bus, queues: Queues
) -> None:
    queue = await queues(ack_wait=60)
    await submit(streams, "j")
    for attempt in range(1, 20):
        waiting = asyncio.create_task(queue.take())
        first = await waiting
        again = asyncio.create_task(queue.take())
        await first.nak(0)
        second = await again
        assert (first.attempt, second.attempt) == (2 * attempt - 1, 2 * attempt)
        await second.nak(0)


async def test_a_job_that_nobody_here_takes_goes_back_and_is_another_workers(
    streams: Bus, queues: Queues
) -> None:
    queue, other = await queues(ack_wait=60), await queues(ack_wait=60)
    taken = await taken_beside_a_kept_one(streams, queue)
    await eventually(lambda: not queue.held)
    kept = await other.take()
    await kept.ack()
    await taken.ack()
    assert queue.held == 0


async def test_a_job_that_was_sent_when_no_more_was_wanted_still_arrives(
    streams: Bus, queues: Queues
) -> None:
    """A server of a cluster sends jobs for a moment after another one has dropped the listener."""
    queue = await queues(ack_wait=60)
    waiting = asyncio.create_task(queue.take())

    async def asked() -> bool:
        return all([(await state(streams, each))["num_waiting"] for each in CLASSES])

    await eventually(asked)
    await submit(streams, "first", job_class="interactive")
    first = await waiting
    await submit(streams, "late")
    await eventually(lambda: queue.held == 1)
    late = await queue.take()
    assert (late.message.data, late.attempt) == (b"late", 1)
    await late.ack()
    await first.ack()


async def taken_beside_a_kept_one(bus: Bus, queue: JobQueue) -> NatsDelivery:
    """A job for which one of the other class came as well, which the queue keeps for the next taker."""
    while True:
        taking = asyncio.create_task(queue.take())
        for job_class in CLASSES:
            await eventually(lambda job_class=job_class: _waits(bus, job_class))
        for job_class in CLASSES:
            bus.send(bus.subjects.job("m", job_class, "o", "chat"), job_class.encode())
        taken = await taking
        await bus.flush()
        if queue.held:
            return taken
        # The second one did not cross with the end of the waiting.
        await asyncio.gather(taken.ack(), (await queue.take()).ack())


async def test_nothing_is_pulled_beyond_what_is_taken(streams: Bus, queues: Queues) -> None:
    queue = await queues()
    await submit(streams, *map(str, range(20)))
    delivery = await queue.take()
    info = await state(streams)
    assert (info["num_ack_pending"], info["num_pending"], queue.held) == (1, 19, 0)
    await delivery.ack()


async def test_a_job_that_crosses_with_the_end_of_waiting_is_kept_for_the_next_taker(
    streams: Bus, queues: Queues
) -> None:
    """Jobs of both classes at once, for one taker; whatever crosses must not be lost or delivered twice."""
    queue = await queues()
    got: list[bytes] = []
    for number in range(40):
        taking = asyncio.create_task(queue.take())
        await eventually(lambda: _waits(streams, "batch"))
        for job_class in ("interactive", "batch"):
            streams.send(streams.subjects.job("m", job_class, "o", "chat"), b"%d" % number)
        first = await taking
        # Without the ack wait: what the server could not deliver any more, it delivers again at once
        # (didNotDeliver), and counts that.
        second = await asyncio.wait_for(queue.take(), ACK_WAIT / 2)
        got += [first.message.data, second.message.data]
        await asyncio.gather(first.ack(), second.ack())
    assert sorted(got) == sorted(b"%d" % number for number in range(40) for _ in range(2))


async def test_a_taker_that_gives_up_leaves_its_job_for_the_next(streams: Bus, queues: Queues) -> None:
    queue = await queues()
    for number in range(30):
        taking = asyncio.create_task(queue.take())
        await asyncio.sleep(0.001 * (number % 7))
        streams.send(streams.subjects.job("m", "batch", "o", "chat"), b"%d" % number)
        await asyncio.sleep(0.001 * (number % 5))
        taking.cancel()
        try:
            delivery = await taking
        except asyncio.CancelledError:
            delivery = await asyncio.wait_for(queue.take(), ACK_WAIT / 2)
        assert delivery.message.data == b"%d" % number
        await delivery.ack()


async def test_a_delay_is_kept_and_the_next_attempt_counted(streams: Bus, queues: Queues) -> None:
    queue = await queues()
    await submit(streams, "delayed")
    await (await queue.take()).nak(2.0)
    await submit(streams, "later")
    later = await queue.take()
    assert later.message.data == b"later"
    await later.ack()
    again = await asyncio.wait_for(queue.take(), 10)
    assert (again.message.data, again.attempt) == (b"delayed", 2)
    await again.nak(0)
    await submit(streams, "last")
    at_once = await queue.take()
    assert (at_once.message.data, at_once.attempt) == (b"delayed", 3)
    await at_once.ack()


async def test_a_terminated_job_is_gone_and_the_server_reports_why(streams: Bus, queues: Queues) -> None:
    advisories: asyncio.Queue[Message] = asyncio.Queue()
    await streams.subscribe("$JS.EVENT.ADVISORY.CONSUMER.MSG_TERMINATED.>", advisories.put_nowait)
    queue = await queues()
    await submit(streams, "1")
    delivery = await queue.take()
    await delivery.term("engine_failed:\r\nworse")
    assert await messages(streams) == 0

    advisory = await asyncio.wait_for(advisories.get(), 5)
    assert msgspec.json.decode(advisory.data)["reason"] == "engine_failed: worse"


async def test_a_job_is_delivered_until_a_worker_ends_it(streams: Bus, queues: Queues) -> None:
    """At a bound of its own the server would keep the job and show it to nobody: workers bound attempts."""
    queue = await queues()
    await submit(streams, "poison")
    for attempt in range(1, 8):
        delivery = await asyncio.wait_for(queue.take(), 5)
        assert delivery.attempt == attempt
        await delivery.nak(0)
    await (await queue.take()).term("gave up")
    assert await messages(streams) == 0


@pytest.mark.parametrize("weights", [{"interactive": 4, "batch": 1}, {"interactive": 1, "batch": 1}])
async def test_classes_share_by_weight_and_none_starves(
    streams: Bus, queues: Queues, weights: dict[str, int]
) -> None:
    queue = await queues(classes=weights)
    for job_class in ("interactive", "batch"):
        await submit(streams, *map(str, range(60)), job_class=job_class)
    total = sum(weights.values())
    picked = []
    for _ in range(10 * total):
        delivery = await queue.take()
        picked.append(class_of(delivery))
        await delivery.ack()
    assert picked.count("batch") in range(10 * weights["batch"] - 1, 10 * weights["batch"] + 2)
    longest = max(len(run) for run in "".join(name[0] for name in picked).split("b"))
    assert longest <= total + 1


async def test_a_class_that_was_alone_for_long_is_not_shut_out(streams: Bus, queues: Queues) -> None:
    queue = await queues()
    await submit(streams, *map(str, range(40)))
    for _ in range(30):
        await (await queue.take()).ack()
    await submit(streams, *map(str, range(10)), job_class="interactive")
    picked = []
    for _ in range(10):
        delivery = await queue.take()
        picked.append(class_of(delivery))
        await delivery.ack()
    assert picked.count("interactive") >= 7
    assert picked.count("batch") >= 1


@pytest.mark.faults
async def test_after_a_crash_of_the_server_a_waiting_taker_gets_the_next_job(
    streams: Bus, queues: Queues, server: NatsServer
) -> None:
    queue = await queues()
    taking = asyncio.create_task(queue.take())
    await eventually(lambda: _waits(streams, "batch"))
    await server.kill()
    await server.restart()
    await streams.until_connected()
    await submit(streams, "after")
    delivery = await asyncio.wait_for(taking, 20)
    await delivery.ack()


@pytest.mark.faults
async def test_a_server_that_stopped_for_a_while_does_not_leave_the_queue_stuck(
    streams: Bus, queues: Queues, server: NatsServer
) -> None:
    """Requests and their ends are lost or late, and the connection may or may not survive."""
    queue = await queues()
    taking = asyncio.create_task(queue.take())
    await eventually(lambda: _waits(streams, "batch"))
    os.kill(server.child.pid, signal.SIGSTOP)
    await asyncio.sleep(2 * EXPIRES)
    os.kill(server.child.pid, signal.SIGCONT)
    await eventually(lambda: streams.connected)
    await submit(streams, "after")
    delivery = await asyncio.wait_for(taking, 8)
    await delivery.ack()


@pytest.mark.faults
async def test_killed_and_restarted_over_and_over_every_job_is_delivered(
    streams: Bus, queues: Queues, server: NatsServer
) -> None:
    queue = await queues()
    names = [str(number) for number in range(200)]
    await submit(streams, *names)
    done: set[bytes] = set()

    async def work() -> None:
        while len(done) < len(names):
            delivery = await queue.take()
            try:
                await delivery.ack()
            except BusUnavailable:
                continue
            done.add(delivery.message.data)

    async def trouble() -> None:
        for share in (0.2, 0.5, 0.8):
            await eventually(lambda share=share: len(done) > share * len(names), within=60)
            await server.kill()
            await server.restart()

    working = [asyncio.create_task(work()) for _ in range(4)]
    await trouble()
    await asyncio.wait_for(asyncio.wait(working, return_when=asyncio.FIRST_COMPLETED), 30)
    for worker in working:
        worker.cancel()
    assert sorted(done) == sorted(name.encode() for name in names)
    assert await messages(streams) == 0


@pytest.mark.faults
async def test_without_jetstream_it_asks_ever_less_often_and_says_so_once(
    streams: Bus, queues: Queues, server: NatsServer, connect: Connect
) -> None:
    queue = await queues()
    asked: list[str] = []
    await server.stop()
    await eventually(lambda: not streams.connected)
    config = server.directory / "nats-server.conf"
    without = NatsServer(
        server.directory / "without",
        port=server.port,
        extra="accounts { A { users: [ { user: u, password: p } ] } }\nno_auth_user: u",
    )
    async with without:
        assert config.exists()
        await streams.until_connected()
        observer = await connect()
        await observer.subscribe("$JS.API.CONSUMER.MSG.NEXT.>", lambda message: asked.append(message.subject))
        with capture_logs() as logs:
            taking = asyncio.create_task(queue.take())
            await eventually(lambda: queue.troubles >= 5)
            assert not queue.healthy
            assert not taking.done()
        told = [entry for entry in logs if entry["event"] == "jobs.not_pulling"]
        assert len(told) == 1
        assert "JetStream" in told[0]["reason"]
        # Five tries took 0.1 + 0.2 + 0.4 + 0.8 s, give or take.
        assert len(asked) <= 10
    await server.start()
    await eventually(lambda: streams.connected)
    await submit(streams, "after")
    delivery = await asyncio.wait_for(taking, 8)
    await eventually(lambda: queue.healthy)
    await delivery.ack()


async def test_a_consumer_that_somebody_deleted_is_made_again(streams: Bus, queues: Queues) -> None:
    queue = await queues()
    taking = asyncio.create_task(queue.take())
    await eventually(lambda: _waits(streams, "batch"))
    await JetStream(streams).call(f"CONSUMER.DELETE.{layout.JOBS}.{layout.durable('m', 'batch')}")
    await submit(streams, "1")
    delivery = await asyncio.wait_for(taking, 5)
    assert class_of(delivery) == "batch"
    await delivery.ack()


async def test_an_operator_may_pause_a_consumer(streams: Bus, queues: Queues) -> None:
    queue = await queues()
    consumer = f"{layout.JOBS}.{layout.durable('m', 'batch')}"
    await JetStream(streams).call(f"CONSUMER.PAUSE.{consumer}", {"pause_until": "2100-01-01T00:00:00Z"})
    await submit(streams, "1")
    taking = asyncio.create_task(queue.take())
    done, _ = await asyncio.wait({taking}, timeout=0.5)
    assert not done
    await JetStream(streams).call(f"CONSUMER.PAUSE.{consumer}", {"pause_until": "2000-01-01T00:00:00Z"})
    delivery = await asyncio.wait_for(taking, 5)
    await delivery.ack()
    assert queue.healthy


async def test_stopping_hands_back_what_nobody_took_and_keeps_what_runs(streams: Bus, queues: Queues) -> None:
    queue, other = await queues(), await queues()
    running = await taken_beside_a_kept_one(streams, queue)
    await queue.stop()
    with pytest.raises(Draining):
        await queue.take()
    handed_back = await asyncio.wait_for(other.take(), 1)
    assert handed_back.attempt == 2
    await handed_back.ack()
    beats = queue.heartbeats.sent
    await eventually(lambda: queue.heartbeats.sent >= beats + 4)
    await running.ack()
    assert await messages(streams) == 0


async def test_stopping_ends_a_taker_that_waits_and_leaves_no_request_behind(
    streams: Bus, queues: Queues
) -> None:
    queue = await queues()
    taking = asyncio.create_task(queue.take())
    await eventually(lambda: _waits(streams, "batch"))
    await queue.stop()
    with pytest.raises(Draining):
        await taking
    await submit(streams, "1")
    other = await queues()
    delivery = await asyncio.wait_for(other.take(), 1)
    assert delivery.attempt == 1
    await delivery.ack()


async def test_while_paused_nothing_is_pulled(streams: Bus, queues: Queues) -> None:
    queue, other = await queues(), await queues()
    taking = asyncio.create_task(queue.take())
    await eventually(lambda: _waits(streams, "batch"))
    await queue.pause()
    await submit(streams, "1")
    await (await asyncio.wait_for(other.take(), 1)).ack()
    assert not taking.done()
    await submit(streams, "2")
    queue.resume()
    await (await asyncio.wait_for(taking, 1)).ack()


async def test_a_job_that_arrives_while_the_queue_is_being_paused_goes_back(
    streams: Bus, queues: Queues
) -> None:
    queue, other = await queues(), await queues()
    for number in range(10):
        taking = asyncio.create_task(queue.take())
        await eventually(lambda: _waits(streams, "batch"))
        await asyncio.gather(queue.pause(), submit(streams, str(number)))
        assert not taking.done()
        await (await asyncio.wait_for(other.take(), 1)).ack()
        queue.resume()
        taking.cancel()


async def test_after_standing_still_nothing_is_pulled_that_would_be_thrown_away(
    streams: Bus, queues: Queues
) -> None:
    queue = await queues()
    taking = [asyncio.create_task(queue.take()) for _ in range(2)]
    await eventually(lambda: _waits(streams, "batch"))
    time.sleep(ACK_WAIT)  # noqa: ASYNC251 - nothing else goes on meanwhile either, as on SIGSTOP
    await submit(streams, *map(str, range(30)))
    for delivery in await asyncio.gather(*taking):
        await delivery.ack()
    # One for each open request, at most, before those who took.
    assert (await state(streams))["delivered"]["consumer_seq"] <= 2 * len(taking)


async def test_a_delivery_that_its_owner_dropped_comes_back(streams: Bus, queues: Queues) -> None:
    """Heartbeats must not keep alive what nobody works on any more."""
    queue = await queues()
    await submit(streams, "1")
    dropped = await queue.take()
    del dropped
    again = await asyncio.wait_for(queue.take(), 3 * ACK_WAIT)
    assert again.attempt == 2
    await again.ack()


@pytest.mark.faults
async def test_an_acknowledgement_that_nobody_confirms_is_told(
    streams: Bus, queues: Queues, server: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("inferbus.workers.bus.queue.delivery.ACK_TIMEOUT", 0.1)
    monkeypatch.setattr("inferbus.workers.bus.queue.delivery.FORGOTTEN", 0.0)
    queue = await queues()
    await submit(streams, "1")
    delivery = await queue.take()
    await server.kill()
    await eventually(lambda: not streams.connected)
    for end in (delivery.ack(), delivery.nak(1), delivery.term("reason")):
        with pytest.raises(BusUnavailable, match="did not confirm"):
            await end
    await server.restart()
    await streams.until_connected()
    again = await asyncio.wait_for(queue.take(), 10)
    # A server that is killed may have forgotten the delivery, and then counts anew.
    assert again.attempt in (1, 2)
    await again.ack()


@pytest.mark.faults
async def test_a_job_taken_a_moment_before_the_server_died_is_left_to_whom_it_is_given_next(
    streams: Bus, queues: Queues, server: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server may have forgotten that delivery, and then has two owners for the job."""
    queue = await queues(ack_wait=30.0)
    await submit(streams, "1", "2")
    with monkeypatch.context() as patched:
        long_ago = time.monotonic() - 2
        patched.setattr("inferbus.workers.bus.queue.delivery.time.monotonic", lambda: long_ago)
        earlier = await queue.take()
    just_now = await queue.take()
    await server.kill()
    await eventually(lambda: not streams.connected)
    assert just_now.stale
    assert not earlier.stale
    await server.restart()
    await streams.until_connected()
    await just_now.nak(0)  # says nothing: it would take the job from its new owner
    await earlier.ack()


async def test_a_late_acknowledgement_is_taken_and_may_be_repeated(streams: Bus, queues: Queues) -> None:
    """So it proves nothing about who owns the job."""
    queue = await queues()
    await submit(streams, "1")
    first = await queue.take()
    queue.heartbeats.discard(first)
    second = await asyncio.wait_for(queue.take(), 3 * ACK_WAIT)
    await first.ack()
    await first.ack()
    await second.ack()
    assert await messages(streams) == 0


async def test_workers_share_the_jobs(streams: Bus, queues: Queues, connect: Connect) -> None:
    mine: list[list[bytes]] = [[], [], []]
    pulling = [await queues(await connect()) for _ in mine]
    await submit(streams, *map(str, range(90)))

    async def work(queue: JobQueue, done: list[bytes]) -> None:
        while True:
            delivery: NatsDelivery = await queue.take()
            done.append(delivery.message.data)
            await delivery.ack()

    tasks = [asyncio.create_task(work(*each)) for each in zip(pulling, mine, strict=True)]
    await eventually(lambda: sum(map(len, mine)) == 90)
    for task in tasks:
        task.cancel()
    assert len({each for done in mine for each in done}) == 90
    assert all(mine)


def test_the_subject_of_an_acknowledgement_is_read_in_both_forms() -> None:
    old = AckSubject.parse("$JS.ACK.INFER_JOBS.m-batch.3.42.7.1700000000000000000.5")
    new = AckSubject.parse("$JS.ACK.hub.ACCHASH.INFER_JOBS.m-batch.3.42.7.1700000000000000000.5.rand")
    assert old == new
    assert old is not None
    assert (old.stream, old.consumer, old.attempt, old.sequence) == ("INFER_JOBS", "m-batch", 3, 42)
    assert AckSubject.parse("_INBOX.x") is None
    assert AckSubject.parse("") is None
