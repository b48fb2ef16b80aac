"""Puts the jobs that wait into the order of turns, where jobs of one owner keep back those of another.

All owners of a class share one consumer, which delivers in the order of submission. Jobs that are given back
to it (nak) it delivers again before all others, in the order in which they were given back. So the order is
changed by pulling everything that waits and giving it back in turn:

    a worker looks → an owner's next job stands far behind its turn
                   → pull what waits; keep owner, sequence and reply subject of each job
                   → nak one after the other, in turn

Other workers go on taking jobs meanwhile: the server serves open pull requests alternately. What a worker had
pulled when it is killed is delivered again after the ack wait.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Iterable
from typing import Final

import msgspec
import structlog

from inferbus.schemas.errors import BusUnavailable
from inferbus.workers.bus.connection.bus import Bus
from inferbus.workers.bus.connection.message import Message
from inferbus.workers.bus.jetstream.client import API, JetStream
from inferbus.workers.bus.queue.delivery import NAK, AckSubject, Heartbeats
from inferbus.workers.bus.queue.pull_requests import NO_MESSAGES, REQUEST_TIMEOUT, PriorityClass
from inferbus.workers.bus.queue.turns import Waiting, in_turn, place
from inferbus.workers.observe import defects

log = structlog.get_logger()

INTERVAL: Final = 2.0
"""Seconds between two looks."""

STAGGER: Final = 0.5
"""Seconds within which a worker looks once more before it reorders, since others may have seen the same."""

DRAINED: Final = 4.0
"""Seconds. A queue that would be delivered by then, as fast as it goes, is being reordered or need not be."""

REST: Final = 10.0
"""Reordering takes place once in so many times its own duration, at most."""

AGAIN: Final = 60.0
"""Seconds after which jobs that were put in turn are put in turn once more: what was given back since, or has
lost its worker, stands behind all of them."""

BEHIND: Final = 2
"""A job stands far behind its turn if it stands at more than so many times its place."""

OWNERS: Final = 8
"""Owners, picked at random, whose next jobs one look examines."""

REACH: Final = 50_000
"""Jobs that are reordered at most; half of the consumer's MAX_ACK_PENDING, since all of them count."""

BATCH: Final = 10_000
BATCH_BYTES: Final = 16 * 1024 * 1024
"""Jobs and bytes of one pull request: the server disconnects a client with more than 64 MB to be sent."""

SLICE: Final = 500
"""Jobs given back before the server's answer is awaited: as many are in doubt if the connection is lost."""

FIRST_COST: Final = 50e-6
"""Seconds that reordering takes for each job, before it was measured."""

MEASURABLE: Final = 1_000
"""Jobs from which on a reordering tells its cost for each of them."""

SILENCE: Final = 2.0
"""Seconds without a message after which a pull request counts as lost."""


class Queued(msgspec.Struct, kw_only=True):
    """What is known of one class.

    Attributes:
        priority_class: The class.
        suspected: Whether jobs may wait.
        running: Jobs that workers hold, rather than that were given back; an estimate, None before the first
            reordering here, which tells it.
        deliveries: By the consumer, and when they were counted.
        rested: When the jobs were last seen to be put in turn, here or elsewhere.
    """

    priority_class: PriorityClass
    suspected: bool = True
    running: int | None = None
    deliveries: tuple[int, float] | None = None
    rested: float


class Backlog(msgspec.Struct, frozen=True, kw_only=True):
    """The jobs of one class, as a look found them.

    Attributes:
        jobs: The subject filter of all of them.
        delivered: Stream sequence of the newest one that was delivered.
        undelivered: Jobs that were not delivered yet.
        unacknowledged: Jobs that were.
        given_back: Those of them that wait to be delivered again; an upper estimate.
        counts: Jobs of each owner; an owner's name is the subject of its jobs, without the kind.
    """

    jobs: str
    delivered: int
    undelivered: int
    unacknowledged: int
    given_back: int
    counts: dict[str, int]


class Reordering:
    """Looks after the order of a worker's classes.

    Args:
        bus: The connection.
        classes: The classes.
        heartbeats: Of the jobs that are open here.
        active: Whether this worker may pull at the moment.
        clock: Monotonic seconds.
    """

    def __init__(
        self,
        bus: Bus,
        classes: Iterable[PriorityClass],
        *,
        heartbeats: Heartbeats,
        active: Callable[[], bool],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._bus = bus
        self._jetstream = JetStream(bus)
        self._queued = {each.job_class: Queued(priority_class=each, rested=clock()) for each in classes}
        self._heartbeats = heartbeats
        self._active = active
        self._clock = clock
        self._cost = FIRST_COST
        self._settled = asyncio.Event()
        self._settled.set()

    def arrived(self, job_class: str) -> None:
        """A job of this class was delivered: more of them may wait."""
        self._queued[job_class].suspected = True

    async def settled(self) -> None:
        """Returns when nothing is pulled here that was not given back; to be called while not `active`."""
        await self._settled.wait()

    async def run(self) -> None:
        """Looks from time to time, until cancelled."""
        while True:
            await asyncio.sleep(INTERVAL * random.uniform(0.75, 1.25))  # noqa: S311  # jitter
            for queued in self._queued.values():
                if not (queued.suspected and self._active()):
                    continue
                try:
                    await self._tend(queued)
                except BusUnavailable as error:
                    log.debug(
                        "jobs.not_reordered", job_class=queued.priority_class.job_class, reason=error.message
                    )
                except Exception:  # supervision point: the order of jobs
                    defects.exception("jobs.reordering_failed", job_class=queued.priority_class.job_class)

    async def _tend(self, queued: Queued) -> None:
        """Reorders one class if that is due."""
        backlog = await self._look(queued)
        if backlog is None or not await self._due(queued, backlog):
            return
        await asyncio.sleep(STAGGER * random.uniform(0.2, 1))  # noqa: S311  # jitter
        backlog = await self._look(queued)
        if backlog is not None and self._active() and self._rested(queued, backlog):
            await self._reorder(queued, backlog)

    async def _look(self, queued: Queued) -> Backlog | None:
        """The jobs of a class, where those of several owners wait."""
        stream, durable = queued.priority_class.stream, queued.priority_class.durable
        info = await self._jetstream.call(f"CONSUMER.INFO.{stream}.{durable}")
        undelivered, unacknowledged = info["num_pending"], info["num_ack_pending"]
        if queued.running is not None:
            queued.running = min(queued.running, unacknowledged)
        # Where it is not known, other workers may have reordered: all may have been given back.
        given_back = unacknowledged - (queued.running or 0)
        now, deliveries = self._clock(), info["delivered"]["consumer_seq"]
        if queued.deliveries is not None:
            before, then = queued.deliveries
            if deliveries - before > max(given_back, undelivered) * (now - then) / DRAINED:
                queued.rested = now
        queued.deliveries = deliveries, now
        queued.suspected = undelivered > 0 or (queued.running is not None and given_back > 0)
        if not queued.suspected or info.get("paused"):
            return None
        jobs = info["config"]["filter_subject"]
        state = (await self._jetstream.call(f"STREAM.INFO.{stream}", {"subjects_filter": jobs}))["state"]
        counts: dict[str, int] = {}
        for subject, count in (state.get("subjects") or {}).items():
            owner = subject.rpartition(".")[0]
            counts[owner] = counts.get(owner, 0) + count
        if len(counts) < 2:
            return None
        return Backlog(
            jobs=jobs,
            delivered=info["delivered"]["stream_seq"],
            undelivered=undelivered,
            unacknowledged=unacknowledged,
            given_back=given_back,
            counts=counts,
        )

    async def _due(self, queued: Queued, backlog: Backlog) -> bool:
        """Whether it is time to reorder."""
        if not self._rested(queued, backlog):
            return False
        known = queued.running is not None
        if known and backlog.given_back and self._clock() - queued.rested >= AGAIN:
            return True
        if not backlog.undelivered:
            return False
        owners = random.sample(sorted(backlog.counts), min(OWNERS, len(backlog.counts)))
        stream = queued.priority_class.stream
        return any(await asyncio.gather(*(self._is_behind(stream, backlog, owner) for owner in owners)))

    def _rested(self, queued: Queued, backlog: Backlog) -> bool:
        """Whether the last reordering, here or elsewhere, is long enough ago."""
        duration = min(REACH, backlog.given_back + backlog.undelivered) * self._cost
        return self._clock() - queued.rested >= max(INTERVAL, REST * duration)

    async def _is_behind(self, stream: str, backlog: Backlog, owner: str) -> bool:
        """Whether the next job of an owner stands far behind its turn, and within reach."""
        first = backlog.delivered + 1
        page, more = await self._jetstream.page(stream, f"{owner}.*", first=first, batch=1)
        if not page:
            return False
        turn = backlog.counts[owner] - more
        _, later = await self._jetstream.page(stream, backlog.jobs, first=page[0].sequence, batch=1)
        stands = backlog.given_back + backlog.undelivered - later
        return BEHIND * place(backlog.counts, turn) < stands <= REACH

    async def _reorder(self, queued: Queued, backlog: Backlog) -> None:
        began, reconnects = self._clock(), self._bus.reconnects
        ack_wait = self._heartbeats.ack_wait
        pulling = Pulling(
            self._bus,
            queued.priority_class,
            heartbeats=self._heartbeats,
            until=began + ack_wait / 4,
            clock=self._clock,
        )
        self._settled.clear()
        try:
            jobs = in_turn(await pulling.pull(REACH, self._active))
            for start in range(0, len(jobs), SLICE):
                late = self._clock() - began > ack_wait / 2
                if late or not self._bus.connected or self._bus.reconnects != reconnects:
                    # Another worker may have them soon, and this would take them away from it.
                    log.warning("jobs.not_put_back", count=len(jobs) - start)
                    return
                for job in jobs[start : start + SLICE]:
                    self._bus.send(job.reply, NAK)
                await self._bus.flush()
        finally:
            self._settled.set()
            queued.rested, queued.deliveries = self._clock(), None
        if pulling.everything:
            queued.running = max(0, backlog.unacknowledged + backlog.undelivered - len(jobs))
        duration = self._clock() - began
        if len(jobs) >= MEASURABLE:
            self._cost = duration / len(jobs)
        if jobs:
            log.info(
                "jobs.reordered",
                job_class=queued.priority_class.job_class,
                count=len(jobs),
                owners=len({job.owner for job in jobs}),
                seconds=round(duration, 3),
            )


class Pulling:
    """Pulls what waits in one class.

    Args:
        bus: The connection.
        priority_class: The class.
        heartbeats: Of the jobs that are open here, which are left out.
        until: No request is sent after this time, by the clock.
        clock: Monotonic seconds.

    Attributes:
        everything: Whether the consumer had no more in the end.
    """

    def __init__(
        self,
        bus: Bus,
        priority_class: PriorityClass,
        *,
        heartbeats: Heartbeats,
        until: float,
        clock: Callable[[], float],
    ) -> None:
        self._bus = bus
        self._heartbeats = heartbeats
        self._subject = f"{API}.CONSUMER.MSG.NEXT.{priority_class.stream}.{priority_class.durable}"
        self._until = until
        self._clock = clock
        self._bytes = max(BATCH_BYTES, 2 * bus.max_payload)
        self._jobs: list[Waiting] = []
        self._changed = asyncio.Event()
        self._ended = self._closed = False
        self.everything = False

    async def pull(self, limit: int, active: Callable[[], bool]) -> list[Waiting]:
        """Jobs in the order of their delivery.

        Args:
            limit: No more than these.
            active: Asked before every request.
        """
        base = self._bus.private_subject()
        subscription = await self._bus.subscribe(f"{base}.*", self._arrived)
        try:
            progress = True
            while progress and active() and self._clock() < self._until and len(self._jobs) < limit:
                before = len(self._jobs)
                await self._request(f"{base}.{before}", min(BATCH, limit - before))
                progress = len(self._jobs) > before
        finally:
            # What the server has sent by then arrives before this returns.
            await subscription.unsubscribe()
            self._closed = True
        return self._jobs

    async def _request(self, reply: str, batch: int) -> None:
        self._ended, last = False, len(self._jobs) + batch
        body = {"batch": batch, "max_bytes": self._bytes, "no_wait": True}
        self._bus.send(self._subject, msgspec.json.encode(body), reply=reply)
        while not self._ended and len(self._jobs) < last:
            self._changed.clear()
            try:
                async with asyncio.timeout(SILENCE):
                    await self._changed.wait()
            except TimeoutError:
                return

    def _arrived(self, message: Message) -> None:
        ack = AckSubject.parse(message.reply)
        if ack is None:
            self._ended = True
            self.everything = message.status in (NO_MESSAGES, REQUEST_TIMEOUT)
        elif self._heartbeats.again(ack, message.reply):
            pass
        elif self._closed:
            # It came late; see `Subscription.unsubscribe`. After a stall it may be another worker's by now.
            if self._clock() < self._until + SILENCE:
                self._bus.send(message.reply, NAK)
        else:
            # Its body is dropped: memory is bounded by the number of jobs.
            owner = message.subject.rpartition(".")[0]
            self._jobs.append(Waiting(owner, ack.sequence, message.reply))
        self._changed.set()
