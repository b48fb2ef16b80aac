"""Jobs of several owners on a real server: whose is taken when, and that each is taken once."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Any

import pytest

from inferbus.schemas.subjects import Subjects
from inferbus.workers.bus.connection.bus import Bus
from inferbus.workers.bus.connection.message import Message
from inferbus.workers.bus.jetstream import layout
from inferbus.workers.bus.jetstream.client import JetStream
from inferbus.workers.bus.queue import reordering
from inferbus.workers.bus.queue.consumers import job_queue
from inferbus.workers.bus.queue.delivery import NatsDelivery
from inferbus.workers.bus.queue.job_queue import JobQueue
from inferbus.workers.config import WorkerSettings
from inferbus.workers.stack.server import NatsServer
from tests.broker.conftest import Connect
from tests.support.eventually import eventually

Queues = Callable[..., Awaitable[JobQueue]]


@pytest.fixture
async def queues(streams: Bus) -> AsyncIterator[Queues]:
    """Makes queues of the model `m`, and stops them afterwards."""
    async with AsyncExitStack() as stack:

        async def make(bus: Bus = streams, **settings: Any) -> JobQueue:
            queue = await job_queue(bus, "m", WorkerSettings(**settings))
            stack.push_async_callback(queue.stop)
            return queue

        yield make


@pytest.fixture
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Looks ten times a second, and reorders as often as that is of use."""
    monkeypatch.setattr(reordering, "INTERVAL", 0.1)
    monkeypatch.setattr(reordering, "REST", 0.0)


async def submit(bus: Bus, owner: str, count: int = 1) -> None:
    """Jobs whose bodies are numbered; the last one is confirmed."""
    subject = bus.subjects.job("m", "batch", owner, "chat")
    for number in range(count - 1):
        bus.send(subject, b"%d" % number)
        if number % 1000 == 0:
            await bus.flush()
    await JetStream(bus).store(subject, b"%d" % (count - 1))


def owner_of(delivery: NatsDelivery) -> str:
    return Subjects().parse_job(delivery.message.subject).owner


async def take(queue: JobQueue, count: int) -> list[NatsDelivery]:
    return [await asyncio.wait_for(queue.take(), 10) for _ in range(count)]


async def end(deliveries: list[NatsDelivery]) -> None:
    await asyncio.gather(*(each.ack() for each in deliveries))


async def state(bus: Bus) -> dict[str, Any]:
    return await JetStream(bus).call(f"CONSUMER.INFO.{layout.JOBS}.{layout.durable('m', 'batch')}")


async def reordered(bus: Bus) -> None:
    """Returns when nothing waits that was not pulled once."""

    async def everything_was_delivered() -> bool:
        return not (await state(bus))["num_pending"]

    await eventually(everything_was_delivered, within=30, what="the jobs are reordered")


async def messages(bus: Bus) -> int:
    return int((await JetStream(bus).call(f"STREAM.INFO.{layout.JOBS}"))["state"]["messages"])


async def test_jobs_behind_ten_thousand_of_another_owner_are_taken_after_a_few_of_these(
    streams: Bus, queues: Queues
) -> None:
    queue = await queues()
    await submit(streams, "a", 10_000)
    running = await take(queue, 8)
    await submit(streams, "b")
    await submit(streams, "c", 5)
    await reordered(streams)
    taken = await take(queue, 11)
    assert [owner_of(each) for each in taken] == list("abcacacacac")
    rest = await take(queue, 100)
    assert {owner_of(each) for each in rest} == {"a"}
    jobs = [*running, *taken, *rest]
    for owner in "abc":
        sequences = [each.message.sequence for each in jobs if owner_of(each) == owner]
        assert sequences == sorted(sequences)
    await end(jobs)
    assert await messages(streams) == 10_006 - len(jobs)


@pytest.mark.usefixtures("often")
async def test_an_owner_that_comes_later_has_its_turn_in_the_first_round(
    streams: Bus, queues: Queues
) -> None:
    queue = await queues()
    await submit(streams, "a", 300)
    await submit(streams, "b", 50)
    running = await take(queue, 2)
    await reordered(streams)
    running += await take(queue, 10)
    assert Counter(map(owner_of, running)) == {"a": 7, "b": 5}
    await submit(streams, "c", 20)
    await reordered(streams)
    taken = await take(queue, 15)
    assert Counter(map(owner_of, taken)) == {"a": 5, "b": 5, "c": 5}
    await end([*running, *taken])


@pytest.mark.usefixtures("often")
async def test_a_worker_that_starts_later_finds_jobs_that_others_put_in_turn(
    streams: Bus, connect: Connect, queues: Queues
) -> None:
    earlier = await queues(await connect())
    await submit(streams, "a", 300)
    await submit(streams, "b")
    running = await take(earlier, 1)
    await reordered(streams)
    await earlier.stop()
    later = await queues()
    running += await take(later, 3)
    await submit(streams, "c")
    await reordered(streams)
    assert "c" in map(owner_of, await take(later, 2))


@pytest.mark.usefixtures("often")
async def test_jobs_of_one_owner_are_never_reordered(streams: Bus, queues: Queues) -> None:
    queue = await queues()
    looks: asyncio.Queue[Message] = asyncio.Queue()
    await submit(streams, "a", 100)
    running = await take(queue, 5)
    await streams.subscribe("$JS.API.CONSUMER.INFO.>", looks.put_nowait)
    for _ in range(5):
        await asyncio.wait_for(looks.get(), 10)
    info = await state(streams)
    assert (info["delivered"]["consumer_seq"], info["num_pending"]) == (5, 95)
    await end(running)


@pytest.mark.usefixtures("often")
async def test_jobs_that_come_in_turn_by_themselves_are_never_reordered(streams: Bus, queues: Queues) -> None:
    queue = await queues()
    looks: asyncio.Queue[Message] = asyncio.Queue()
    for _ in range(50):
        await submit(streams, "a")
        await submit(streams, "b")
    running = await take(queue, 6)
    await streams.subscribe("$JS.API.CONSUMER.INFO.>", looks.put_nowait)
    for _ in range(5):
        await asyncio.wait_for(looks.get(), 10)
    assert (await state(streams))["delivered"]["consumer_seq"] == 6
    await end(running)


@pytest.mark.usefixtures("often")
async def test_two_workers_that_reorder_at_the_same_time_lose_and_double_nothing(
    streams: Bus, connect: Connect, queues: Queues, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Neither waits for the other, nor for a queue that is about to be empty.
    monkeypatch.setattr(reordering, "STAGGER", 0.0)
    monkeypatch.setattr(reordering, "DRAINED", 1e-9)
    workers = [await queues(await connect()) for _ in range(2)]
    counts = {"a": 3000, "b": 300, "c": 30} | {f"late{number}": 3 for number in range(30)}
    done: list[tuple[str, bytes]] = []

    async def work(queue: JobQueue) -> None:
        while len(done) < sum(counts.values()):
            delivery = await queue.take()
            done.append((owner_of(delivery), delivery.message.data))
            await delivery.ack()

    for owner in "abc":
        await submit(streams, owner, counts[owner])
    slots = [asyncio.create_task(work(queue)) for queue in workers for _ in range(4)]
    for owner in counts:
        if owner.startswith("late"):
            await submit(streams, owner, counts[owner])
            seen = len(done)
            await eventually(lambda seen=seen: len(done) >= min(seen + 50, sum(counts.values())))
    await eventually(lambda: len(done) >= sum(counts.values()), within=60)
    for slot in slots:
        slot.cancel()
    await asyncio.gather(*slots, return_exceptions=True)
    expected = [(owner, b"%d" % number) for owner, count in counts.items() for number in range(count)]
    assert sorted(done) == sorted(expected)
    info = await state(streams)
    assert info["delivered"]["consumer_seq"] > 2 * len(done)
    assert (info["num_ack_pending"], await messages(streams)) == (0, 0)


@pytest.mark.usefixtures("often")
@pytest.mark.parametrize("leave", [JobQueue.pause, JobQueue.stop])
async def test_a_worker_that_leaves_while_it_reorders_puts_everything_back(
    streams: Bus, connect: Connect, queues: Queues, leave: Callable[[JobQueue], Awaitable[None]]
) -> None:
    queue = await queues(await connect())
    await submit(streams, "a", 5000)
    await submit(streams, "b")
    running = await take(queue, 1)

    async def pulls() -> bool:
        return bool((await state(streams))["num_ack_pending"] > len(running))

    await eventually(pulls)
    await leave(queue)
    # Long before the ack wait of 30 s is over.
    rest = await take(await queues(), 5000)
    assert len({each.message.sequence for each in [*running, *rest]}) == 5001
    await end([*running, *rest])
    assert await messages(streams) == 0


@pytest.mark.usefixtures("often")
async def test_a_job_that_is_given_back_comes_before_those_that_were_put_in_turn(
    streams: Bus, queues: Queues, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reordering, "AGAIN", 0.5)
    queue = await queues()
    await submit(streams, "a", 500)
    await submit(streams, "b", 100)
    first, *running = await take(queue, 4)
    await reordered(streams)
    await first.nak(0)
    deliveries = (await state(streams))["delivered"]["consumer_seq"]

    async def everything_was_delivered_again() -> bool:
        return bool((await state(streams))["delivered"]["consumer_seq"] >= deliveries + 597)

    await eventually(everything_was_delivered_again)
    taken = await take(queue, 2)
    assert first.message.sequence in [each.message.sequence for each in taken]
    await end([*running, *taken])


@pytest.mark.faults
@pytest.mark.usefixtures("often")
async def test_a_server_that_dies_while_jobs_are_reordered_loses_none(
    streams: Bus, queues: Queues, server: NatsServer
) -> None:
    queue = await queues(ack_wait=1.2)
    await submit(streams, "a", 5000)
    await submit(streams, "b")
    running = await take(queue, 1)

    async def pulls() -> bool:
        return bool((await state(streams))["num_ack_pending"] > len(running))

    await eventually(pulls)
    await server.kill()
    await server.restart()
    await streams.until_connected()
    done = {running[0].message.sequence}
    while len(done) < 5001:
        delivery = await asyncio.wait_for(queue.take(), 20)
        done.add(delivery.message.sequence)
        await delivery.ack()
    await running[0].ack()
    await eventually(lambda: _empty(streams))


async def _empty(bus: Bus) -> bool:
    return not await messages(bus)
