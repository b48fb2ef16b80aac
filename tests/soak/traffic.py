"""Those who hand jobs in, cancel some, hand some in once more, and read what comes of them."""

from __future__ import annotations

import asyncio
import contextlib
import datetime as dt
from collections.abc import AsyncIterator, Coroutine
from typing import Any, Final

from inferbus.schemas import codec
from inferbus.schemas.errors import BusUnavailable, InferbusError
from inferbus.workers.bus.jetstream import browse, layout
from inferbus.workers.client import Client, Job
from tests.soak.jobs import BROKEN, MODEL, OWNERS, POISON, Order, Orders
from tests.soak.ledger import Ledger, Reading, Submission

QUEUED: Final = 200
"""Jobs in the queue beyond which no more are handed in: what a server can be asked to make up for."""

HANDING_IN: Final = 64
"""Jobs that are being handed in at once, at most."""

LOOK_EVERY: Final = 0.25
AGAIN: Final = 0.2
"""Seconds until something is tried again that NATS did not take."""

TROUBLE: Final = {BROKEN: (2.0, 6.0), POISON: (4.0, 24.0)}
"""Jobs that come by the clock: when the first does, and how far apart they are, in seconds."""

LATE_READERS: Final = 32
"""At once."""


class Traffic:
    """All of it.

    Args:
        clients: One of each owner.
        orders: What to hand in.
        ledger: Where everything is noted.
    """

    def __init__(self, clients: dict[str, Client], orders: Orders, ledger: Ledger) -> None:
        self._clients = clients
        self._orders = orders
        self._ledger = ledger
        self._tasks: set[asyncio.Task[None]] = set()
        self._slots = asyncio.Semaphore(HANDING_IN)
        self._room = asyncio.Event()
        self._room.set()

    async def run(self, seconds: float, rate: float) -> None:
        """Hands in so many jobs a second, for so long; fewer while the queue is long."""
        loop = asyncio.get_running_loop()
        started = due = loop.time()
        looking = asyncio.create_task(self._look())
        # In the first half only, since they take a while to end.
        trouble = [
            (first + number * apart, name)
            for name, (first, apart) in TROUBLE.items()
            for number in range(int(max(seconds / 2 - first, 0.0) / apart) + 1)
        ]
        trouble.sort(reverse=True)
        try:
            while (now := loop.time()) < started + seconds:
                await self._room.wait()
                await self._slots.acquire()
                name = trouble.pop()[1] if trouble and trouble[-1][0] <= now - started else None
                self._spawn(self._carry_out(self._orders.next(name)))
                # What could not be done in time is not made up for at once.
                due = max(due + 1 / rate, now - 1.0)
                await asyncio.sleep(due - loop.time())
        finally:
            looking.cancel()

    async def settled(self) -> None:
        """Waits until everybody has done what they wanted, and live readers have read to the end."""
        while self._tasks:
            await asyncio.wait(self._tasks)

    async def read_late(self) -> None:
        """Reads the streams of which nobody has wanted to know before."""
        gate = asyncio.Semaphore(LATE_READERS)

        async def read(submission: Submission) -> None:
            async with gate:
                await self._read(submission, late=True)

        async with asyncio.TaskGroup() as group:
            for submission in list(self._ledger.submissions.values()):
                if submission.order.reader == "late":
                    group.create_task(read(submission))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (problem := task.exception()) is not None:
            self._ledger.wrong("wrong", f"a user of the client met {problem!r}")

    async def _look(self) -> None:
        """Keeps the queue from growing without end."""
        bus = next(iter(self._clients.values())).bus
        while True:
            with contextlib.suppress(BusUnavailable):
                queued = (await browse.stream_info(bus, layout.JOBS))["state"]["messages"]
                if queued < QUEUED:
                    self._room.set()
                else:
                    self._room.clear()
            await asyncio.sleep(LOOK_EVERY)

    async def _carry_out(self, order: Order) -> None:
        """One job, from the first time that it is handed in to the end of its stream, if that is read."""
        tried = dt.datetime.now(dt.UTC)
        try:
            job = await self._hand_in(order)
        finally:
            self._slots.release()
        submission = self._ledger.accept(order, _sequence(job), tried)
        if order.reader == "live":
            self._spawn(self._read(submission, late=False))
        if order.cancel is not None:
            await asyncio.sleep(order.cancel)
            await self._cancel(order, job)
        if order.twice is not None:
            await asyncio.sleep(order.twice)
            await self._hand_in_twice(submission)
        if order.again is not None:
            await asyncio.sleep(order.again)
            await self._hand_in_again(order)

    async def _hand_in(self, order: Order) -> Job:
        """Until it is accepted; its id keeps it from being stored twice."""
        while True:
            try:
                return await self._submit(order)
            except BusUnavailable:
                await asyncio.sleep(AGAIN)

    async def _hand_in_twice(self, submission: Submission) -> None:
        tried = dt.datetime.now(dt.UTC)
        job = await self._hand_in(submission.order)
        if job.submission == submission.sequence:
            self._ledger.repeated += 1
            return
        self._ledger.accept(submission.order, _sequence(job), tried)
        self._ledger.repeats[_sequence(job)] = submission.sequence

    async def _hand_in_again(self, order: Order) -> None:
        tried = dt.datetime.now(dt.UTC)
        try:
            job = await self._submit(order, again=True)
        except BusUnavailable:
            self._ledger.uncertain.append((order, tried))
        else:
            self._ledger.accept(order, _sequence(job), tried)

    async def _submit(self, order: Order, *, again: bool = False) -> Job:
        return await self._clients[order.owner].submit(
            order.kind,
            MODEL,
            order.body,
            job_id=order.id,
            job_class=order.job_class,
            deadline=order.deadline,
            stream=order.streams,
            again=again,
        )

    async def _cancel(self, order: Order, job: Job) -> None:
        while True:
            try:
                return await self._clients[order.owner].cancel(job)
            except BusUnavailable:
                await asyncio.sleep(AGAIN)

    async def _read(self, submission: Submission, *, late: bool) -> None:
        """Reads a job's stream to its end; a reader that cannot even begin tries again."""
        order = submission.order
        job = Job(id=order.id, owner=order.owner, submission=submission.sequence)
        reading = Reading(submission=submission, late=late)
        self._ledger.readings.append(reading)
        while reading.status is None:
            stream = self._clients[order.owner].stream(job)
            try:
                async for event in stream:
                    reading.take(event)
            except BusUnavailable:
                await asyncio.sleep(AGAIN)
                reading.anew()
            except InferbusError as error:
                if stream.status is None:
                    reading.problems.append(f"reading failed: {error.code}: {error.message}")
                    return
            reading.status = stream.status


@contextlib.asynccontextmanager
async def clients(url: str) -> AsyncIterator[dict[str, Client]]:
    """A client of every owner; one of them speaks MessagePack."""
    async with contextlib.AsyncExitStack() as stack:
        found = {}
        for owner in OWNERS:
            kind = codec.MSGPACK if owner == OWNERS[-1] else codec.JSON
            connecting = Client.connect(url, owner=owner, content_type=kind, name=f"soak {owner}")
            found[owner] = await stack.enter_async_context(connecting)
        yield found


def _sequence(job: Job) -> int:
    assert job.submission is not None, "a job that was handed in has a number"
    return job.submission
