"""Pulling jobs: one for every taker, from several classes by weight.

nats-py's `fetch` hangs over a server restart, leaves pull requests behind that
swallow the next job, and knows no classes (facts 4.3, 4.4). So pull requests
are sent here, short-lived ones, and followed:

    a job is wanted → ask class after class, in the order of fairness, without waiting
                    → all empty: one waiting request to each, on a subscription of its own
    a job arrived and no more is wanted → that subscription is drained, and with the server
                      dropping requests that nobody listens for, no further job comes

Requests live for 2 s and are told when they end, so they need no heartbeats of
their own: one that is not heard of for a second more is lost.

A job may still cross with that end, and come even after the server said that
it had sent everything: one of its threads had found the listener before, and
sent after that. It is kept here, with heartbeats, and given to the next taker.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

import msgspec
import structlog

from inferbus.schemas.errors import BusUnavailable, Draining, InferbusError
from inferbus.workers.bus.connection.bus import Bus, Subscription
from inferbus.workers.bus.connection.message import Message
from inferbus.workers.bus.durations import nanoseconds
from inferbus.workers.bus.errors import CONSUMER_NOT_FOUND, STREAM_NOT_FOUND, ApiError
from inferbus.workers.bus.jetstream.client import API, api
from inferbus.workers.bus.queue.delivery import AckSubject, Heartbeats, NatsDelivery
from inferbus.workers.bus.queue.fairness import Fair

log = structlog.get_logger()

EXPIRES: Final = 2.0
"""Seconds that a waiting request lives: a server that restarted has forgotten it (trial A14)."""

GRACE: Final = 1.0
"""Seconds beyond that after which its end is no longer waited for."""

BACKOFF_FIRST: Final = 0.1
BACKOFF_LAST: Final = 5.0
LOG_INTERVAL: Final = 30.0
"""A fault that lasts is told once in so many seconds (trial A15)."""


class PriorityClass(msgspec.Struct, frozen=True, kw_only=True):
    """One class of jobs.

    Attributes:
        job_class: Its name.
        weight: Its share.
        stream: Where its jobs are.
        durable: The consumer that gives them out.
    """

    job_class: str
    weight: int
    stream: str
    durable: str


class _Pull:
    """One pull request that the server has not answered in full."""

    __slots__ = ("deadline", "lane", "remaining", "token")

    def __init__(self, lane: PriorityClass, token: str, batch: int, deadline: float) -> None:
        self.lane = lane
        self.token = token
        self.remaining = batch
        self.deadline = deadline


class JobQueue:
    """Where a worker's durable jobs come from.

    Args:
        bus: The connection.
        lanes: The classes.
        ack_wait: Of their consumers, in seconds; the shortest where they differ.
        recreate: Makes the consumers anew, after somebody deleted one.
        clock: Monotonic seconds.

    Attributes:
        troubles: Faults so far.
    """

    def __init__(
        self,
        bus: Bus,
        lanes: Sequence[PriorityClass],
        *,
        ack_wait: float,
        recreate: Callable[[], Awaitable[None]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._bus = bus
        self._lanes = {lane.job_class: lane for lane in lanes}
        self._by_consumer = {(lane.stream, lane.durable): lane for lane in lanes}
        self._recreate = recreate
        self._clock = clock
        self._fair = Fair({lane.job_class: lane.weight for lane in lanes})
        self._base = bus.private_subject()
        self._tokens = itertools.count(1)
        self._pulls: dict[str, _Pull] = {}
        self._problem: str | None = None
        self._held: deque[NatsDelivery] = deque()
        self._takers: deque[asyncio.Future[NatsDelivery]] = deque()
        self._changed = asyncio.Event()
        self._quiet = asyncio.Event()
        self._paused = False
        self._stopped = False
        self._pump: asyncio.Task[None] | None = None
        self._late: set[asyncio.Task[None]] = set()
        self._failures = 0
        self._logged = -LOG_INTERVAL
        self.heartbeats = Heartbeats(bus, ack_wait, stalled=self._changed.set)
        self.troubles = 0

    @property
    def healthy(self) -> bool:
        """False while jobs cannot be pulled: NATS is away, or JetStream does not answer."""
        return self._bus.connected and self._failures < 2

    @property
    def held(self) -> int:
        """Jobs that were delivered and not yet taken."""
        return len(self._held)

    async def take(self) -> NatsDelivery:
        """Waits for the next job; to be called with a free slot in hand.

        Raises:
            Draining: After `stop`.
        """
        if self._stopped:
            raise Draining("this worker takes no more jobs")
        self._start()
        if self._held and not self._paused:
            return self._held.popleft()
        taker: asyncio.Future[NatsDelivery] = asyncio.get_running_loop().create_future()
        self._takers.append(taker)
        self._changed.set()
        try:
            return await taker
        except asyncio.CancelledError:
            if taker.done() and not taker.cancelled() and taker.exception() is None:
                self._held.appendleft(taker.result())
            raise
        finally:
            if taker in self._takers:
                self._takers.remove(taker)
            self._changed.set()

    async def pause(self) -> None:
        """Pulls nothing until `resume`; what was pulled and not taken goes back at once."""
        self._paused = True
        await self._settle()

    def resume(self) -> None:
        """Pulls again."""
        self._paused = False
        self._changed.set()

    async def stop(self) -> None:
        """Pulls nothing more, and hands back what was pulled and not taken. Heartbeats go on for the rest."""
        self._stopped = True
        self._refuse_takers(Draining("this worker takes no more jobs"))
        await self._settle()
        self.heartbeats.stop()

    def _refuse_takers(self, error: InferbusError) -> None:
        for taker in self._takers:
            if not taker.done():
                taker.set_exception(error)

    async def _settle(self) -> None:
        self._changed.set()
        if self._pump is not None and not self._pump.done():
            await self._quiet.wait()
            if self._stopped:
                self._pump.cancel()
                await asyncio.wait({self._pump})
        await self._hand_back()

    async def _hand_back(self) -> None:
        held, self._held = list(self._held), deque()
        if not held:
            return
        log.info("jobs.handed_back", count=len(held))
        if not self._bus.connected:
            # They come back by themselves: nobody sends heartbeats for them any more.
            return
        results = await asyncio.gather(*(each.nak(0) for each in held), return_exceptions=True)
        for problem in results:
            if isinstance(problem, BaseException):
                log.warning("jobs.not_handed_back", error=str(problem))

    def _start(self) -> None:
        if self._pump is None:
            self.heartbeats.start()
            self._pump = asyncio.create_task(self._run(), name="job-queue")

    @property
    def _wanted(self) -> int:
        """How many jobs are wanted at the moment."""
        if self._stopped or self._paused or not self._bus.connected or self._suspicion > 0:
            return 0
        return sum(not taker.done() for taker in self._takers)

    @property
    def _suspicion(self) -> float:
        """Seconds for which what arrives is thrown away, so that nothing must be asked for."""
        return self.heartbeats.suspect_until - time.monotonic()

    async def _run(self) -> None:
        forget = self._bus.on_change(lambda _: self._changed.set())
        probes: Subscription | None = None
        try:
            while not self._bus.closed.is_set():
                self._changed.clear()
                left = self._suspicion
                if not self._wanted:
                    self._quiet.set()
                    await (self._change(self._clock() + left) if left > 0 else self._changed.wait())
                    continue
                self._quiet.clear()
                try:
                    probes = probes or await self._bus.subscribe(f"{self._base}.probe.*", self._arrived)
                    await self._round()
                except BusUnavailable as error:
                    self._problem = error.message
                except Exception:  # supervision point: the pull loop
                    log.exception("jobs.pull_failed")
                    self._problem = "a defect"
                if self._problem is not None and self._bus.connected:
                    await self._recover()
        finally:
            self._quiet.set()
            forget()
            if self._bus.closed.is_set():
                self._refuse_takers(BusUnavailable("the connection to NATS is closed"))
            if probes is not None:
                await probes.unsubscribe()

    async def _round(self) -> None:
        """Asks every class once without waiting; then waits for whichever has a job first."""
        for job_class in self._fair.order():
            if not self._wanted:
                return
            if await self._probe(self._lanes[job_class]) or self._problem is not None:
                return
            self._fair.empty(job_class)
        await self._wait()

    async def _probe(self, lane: PriorityClass) -> bool:
        """Whether a job of this class came."""
        pull = self._pull(lane, "probe", 1, wait=False)
        while pull.token in self._pulls and self._bus.connected:
            self._changed.clear()
            if not await self._change(pull.deadline):
                self._pulls.pop(pull.token, None)
                self._problem = f"{lane.stream} did not answer"
        self._pulls.pop(pull.token, None)
        return pull.remaining == 0

    async def _wait(self) -> None:
        """Until a job came for every taker, or something went wrong."""
        kind = f"wait{next(self._tokens):x}"
        waiting = await self._bus.subscribe(f"{self._base}.{kind}.*", self._arrived)
        try:
            while (wanted := self._wanted) and self._problem is None:
                for lane in self._lanes.values():
                    asked = sum(pull.remaining for pull in self._pulls.values() if pull.lane is lane)
                    if asked < wanted:
                        self._pull(lane, kind, wanted - asked, wait=True)
                self._changed.clear()
                if not await self._change(min(pull.deadline for pull in self._pulls.values())):
                    self._problem = "pull requests are not answered"
        finally:
            # The server drops requests that nobody listens for; what it has sent by then arrives before this
            # returns, and is kept.
            await waiting.unsubscribe()
            self._pulls.clear()

    async def _change(self, deadline: float) -> bool:
        """Waits for anything to happen; False when the deadline passed before."""
        try:
            async with asyncio.timeout(max(0.0, deadline - self._clock())):
                await self._changed.wait()
        except TimeoutError:
            return False
        return True

    def _pull(self, lane: PriorityClass, kind: str, batch: int, *, wait: bool) -> _Pull:
        token = f"{self._base}.{kind}.{next(self._tokens):x}"
        expires = EXPIRES if wait else 0.0
        pull = _Pull(lane, token, batch, self._clock() + expires + GRACE)
        self._pulls[token] = pull
        body: dict[str, object] = {"batch": batch}
        body |= {"expires": nanoseconds(expires)} if wait else {"no_wait": True}
        subject = f"{API}.CONSUMER.MSG.NEXT.{lane.stream}.{lane.durable}"
        self._bus.send(subject, msgspec.json.encode(body), reply=token)
        return pull

    def _arrived(self, message: Message) -> None:
        self._changed.set()
        ack = AckSubject.parse(message.reply)
        if ack is None:
            self._told(message)
            return
        self._well()
        lane = self._by_consumer.get((ack.stream, ack.consumer))
        name = lane.job_class if lane else ""
        for pull in list(self._pulls.values()):
            if pull.lane is lane:
                pull.remaining -= 1
                if pull.remaining == 0:
                    del self._pulls[pull.token]
                break
        if self._suspicion > 0:
            log.warning("jobs.too_old", sequence=ack.sequence, attempt=ack.attempt)
            return
        if lane is not None:
            self._fair.picked(name)
        self._give(NatsDelivery(self._bus, message, ack, self.heartbeats, lane=name))

    def _give(self, delivery: NatsDelivery) -> None:
        while self._takers:
            taker = self._takers.popleft()
            if not taker.done():
                taker.set_result(delivery)
                return
        self._held.append(delivery)
        if self._quiet.is_set() and (self._stopped or self._paused):
            # It came late; see `Subscription.unsubscribe`.
            late = asyncio.create_task(self._hand_back())
            self._late.add(late)
            late.add_done_callback(self._late.discard)

    def _told(self, message: Message) -> None:
        """The server ended a pull request."""
        status = message.status
        if status == "100":
            return
        pull = self._pulls.pop(message.subject, None)
        if status in ("404", "408"):
            self._well()
        elif pull is not None:
            self._problem = message.headers.get("Description", "") or f"status {status}"

    def _well(self) -> None:
        if self._failures:
            log.info("jobs.pulling_again", lanes=list(self._lanes))
        self._failures = 0

    async def _recover(self) -> None:
        """After a fault: consumers that are gone are made again; then a pause, longer every time."""
        problem, self._problem = self._problem, None
        self._pulls.clear()
        self.troubles += 1
        self._failures += 1
        try:
            for lane in self._lanes.values():
                await api(self._bus, f"CONSUMER.INFO.{lane.stream}.{lane.durable}", timeout=2.0)
        except ApiError as error:
            problem = error.message
            if error.err_code in (CONSUMER_NOT_FOUND, STREAM_NOT_FOUND):
                problem = await self._make_again(problem)
        except BusUnavailable as error:
            problem = error.message
        if self._clock() - self._logged >= LOG_INTERVAL and self._failures > 1:
            self._logged = self._clock()
            log.error("jobs.not_pulling", reason=problem, failures=self._failures)
        pause = min(BACKOFF_FIRST * 2.0 ** min(self._failures - 1, 16), BACKOFF_LAST)
        # Until then nothing else helps, except the end of it all.
        await self._rest(pause * random.uniform(0.75, 1.25))  # noqa: S311  # jitter

    async def _make_again(self, problem: str) -> str:
        try:
            await self._recreate()
        except BusUnavailable as error:
            return error.message
        log.warning("jobs.consumer_made_again", reason=problem)
        return problem

    async def _rest(self, seconds: float) -> None:
        end = self._clock() + seconds
        while not (self._stopped or self._paused) and await self._change(end):
            self._changed.clear()
