"""The job queue of a worker: one job for every taker, from several classes by weight.

nats-py's `fetch` does not return while its server restarts, and leaves pull requests behind whose job nobody
takes; and it pulls from one consumer. So pull requests are sent and followed here:

    a job is wanted  → ask class after class, in the order of fairness, without waiting
                     → all empty: one waiting request to each, on a subscription of its own
    no more is wanted → that subscription ends soon after, and with it its requests: the server drops those
                       that nobody listens for

Requests live for 2 s and the server reports their end, so they need no heartbeats of their own: one whose end
is not reported within a second more is lost.

A job may cross with the end of what asked for it. In a cluster the server that delivers learns of the end
later than the one that then drops the job, which waits for a whole ack wait. So a subscription ends only when
its last jobs are here. One may even come after the server's PONG: a thread of the server may have found the
listener before, and send afterwards. Such jobs are held here, with heartbeats, for the next taker, and handed
back if none comes soon.

A job that is open here and is delivered here once more, because a heartbeat was lost or somebody shortened
the ack wait, is not begun a second time.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, Final

import structlog

from inferbus.schemas.errors import BusUnavailable, Draining, InferbusError
from inferbus.workers.bus.connection.bus import Bus
from inferbus.workers.bus.connection.message import Message
from inferbus.workers.bus.connection.subscription import Subscription
from inferbus.workers.bus.durations import seconds
from inferbus.workers.bus.errors import CONSUMER_NOT_FOUND, STREAM_NOT_FOUND, ApiError
from inferbus.workers.bus.jetstream.client import JetStream
from inferbus.workers.bus.queue.delivery import AckSubject, Heartbeats, NatsDelivery
from inferbus.workers.bus.queue.fairness import Fair
from inferbus.workers.bus.queue.pull_requests import (
    NO_MESSAGES,
    REQUEST_TIMEOUT,
    PriorityClass,
    PullRequests,
)
from inferbus.workers.bus.queue.reordering import Reordering
from inferbus.workers.observe import defects

log = structlog.get_logger()

IDLE_HEARTBEAT: Final = "100"

_PROBE: Final = "probe"

FOLLOW_INTERVAL: Final = 5.0
"""Seconds between two looks at what others may change: the consumers' ack wait, the stream's subjects."""

HOLD_BACK: Final = 0.3
"""Seconds for which jobs may be on their way to a subscription that is not needed any more."""

HELD: Final = 0.3
"""Seconds for which a job that came too late waits for a taker."""

BACKOFF_FIRST: Final = 0.1
BACKOFF_LAST: Final = 5.0
LOG_INTERVAL: Final = 30.0
"""Seconds between log entries about a fault that lasts."""


class JobQueue:
    """Pulls a worker's durable jobs.

    Args:
        bus: The connection.
        classes: The classes.
        ack_wait: Of their consumers, in seconds; the shortest where they differ.
        recreate: Makes the consumers again, after somebody deleted one.
        capture: Has the stream of jobs capture the model's jobs, where it does not.
        clock: Monotonic seconds.

    Attributes:
        troubles: Faults so far.
    """

    def __init__(
        self,
        bus: Bus,
        classes: Sequence[PriorityClass],
        *,
        ack_wait: float,
        recreate: Callable[[], Awaitable[None]],
        capture: Callable[[], Awaitable[None]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._bus = bus
        self._classes = {each.job_class: each for each in classes}
        self._by_consumer = {(each.stream, each.durable): each for each in classes}
        self._recreate = recreate
        self._capture = capture
        self._clock = clock
        self._fair = Fair({each.job_class: each.weight for each in classes})
        self._pulls = PullRequests(bus, clock)
        self._problem: str | None = None
        self._held: deque[NatsDelivery] = deque()
        self._takers: deque[asyncio.Future[NatsDelivery]] = deque()
        self._changed = asyncio.Event()
        self._quiet = asyncio.Event()
        self._look = asyncio.Event()
        self._paused = False
        self._stopped = False
        self._loop: asyncio.Task[None] | None = None
        self._returning: set[asyncio.Task[None]] = set()
        self._ending: set[asyncio.Task[None]] = set()
        self._failures = 0
        self._logged = -LOG_INTERVAL
        self.heartbeats = Heartbeats(bus, ack_wait, stalled=self._changed.set)
        self._reordering = Reordering(
            bus, classes, heartbeats=self.heartbeats, active=lambda: self._may_pull, clock=clock
        )
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
                self._hold(taker.result())
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
        if self._loop is not None and not self._loop.done():
            await self._quiet.wait()
            await self._reordering.settled()
            if self._ending:
                await asyncio.wait(self._ending)
            if self._stopped:
                self._loop.cancel()
                await asyncio.wait({self._loop})
        await self._hand_back(list(self._held))

    async def _hand_back(self, jobs: list[NatsDelivery]) -> None:
        """Gives jobs back that nobody has taken yet."""
        held = [each for each in jobs if each in self._held]
        for each in held:
            self._held.remove(each)
        if not held:
            return
        log.info("jobs.handed_back", count=len(held))
        if not self._bus.connected:
            # The server delivers them again after the ack wait: their heartbeats end here.
            return
        results = await asyncio.gather(*(each.nak(0) for each in held), return_exceptions=True)
        for problem in results:
            if isinstance(problem, BaseException):
                log.warning("jobs.not_handed_back", error=str(problem))

    def _start(self) -> None:
        if self._loop is None:
            self.heartbeats.start()
            self._loop = asyncio.create_task(self._run(), name="job-queue")

    @property
    def _wanted(self) -> int:
        """How many jobs are wanted at the moment."""
        return sum(not taker.done() for taker in self._takers) if self._may_pull else 0

    @property
    def _may_pull(self) -> bool:
        return not (self._stopped or self._paused) and self._bus.connected and self._suspect_for <= 0

    @property
    def _suspect_for(self) -> float:
        """Seconds for which jobs that arrive are dropped, so that none must be asked for."""
        return self.heartbeats.suspect_until - time.monotonic()

    async def _run(self) -> None:
        forget = self._bus.on_change(lambda _: self._changed.set())
        reordering = asyncio.create_task(self._reordering.run(), name="job-order")
        following = asyncio.create_task(self._follow(), name="job-ack-wait")
        probes: Subscription | None = None
        try:
            while not self._bus.closed.is_set():
                self._changed.clear()
                left = self._suspect_for
                if not self._wanted:
                    self._quiet.set()
                    await (self._change(self._clock() + left) if left > 0 else self._changed.wait())
                    continue
                self._quiet.clear()
                try:
                    probes = probes or await self._bus.subscribe(
                        self._pulls.replies(_PROBE), self._arrived, undecodable=True
                    )
                    await self._round()
                except BusUnavailable as error:
                    self._problem = error.message
                except Exception:  # supervision point: the pull loop
                    defects.exception("jobs.pull_failed")
                    self._problem = "a defect"
                if self._problem is not None and self._bus.connected:
                    await self._recover()
        finally:
            self._quiet.set()
            reordering.cancel()
            following.cancel()
            forget()
            if self._bus.closed.is_set():
                self._refuse_takers(BusUnavailable("the connection to NATS is closed"))
            if probes is not None:
                await probes.unsubscribe()

    async def _follow(self) -> None:
        """Looks after what others may change: now and then, and when a job comes again.

        Heartbeats follow the consumers' ack wait. And a worker of another model, or an operator, may have put
        back the stream's subjects as they were before this model's were among them: the server updates a
        stream as a whole, without a condition.
        """
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(FOLLOW_INTERVAL * random.uniform(0.75, 1.25)):  # noqa: S311
                    await self._look.wait()
            self._look.clear()
            try:
                await self._capture()
                infos = [await self._info(each) for each in self._classes.values()]
            except BusUnavailable as error:
                log.debug("jobs.not_looked_after", reason=error.message)
            else:
                self.heartbeats.follow(min(seconds(each["config"]["ack_wait"]) for each in infos))

    async def _info(self, priority_class: PriorityClass) -> dict[str, Any]:
        path = f"CONSUMER.INFO.{priority_class.stream}.{priority_class.durable}"
        return await JetStream(self._bus).call(path, timeout=2.0)

    async def _round(self) -> None:
        """Asks every class once without waiting; then waits for whichever has a job first."""
        for job_class in self._fair.order():
            if not self._wanted:
                return
            if await self._probe(self._classes[job_class]) or self._problem is not None:
                return
            self._fair.empty(job_class)
        await self._wait()

    async def _probe(self, priority_class: PriorityClass) -> bool:
        """Asks one class without waiting; whether a job came."""
        pull = self._pulls.send(priority_class, _PROBE, 1, wait=False)
        while pull in self._pulls and self._bus.connected:
            self._changed.clear()
            if not await self._change(pull.deadline):
                self._pulls.end(pull.reply)
                self._problem = f"{priority_class.stream} did not answer"
        self._pulls.end(pull.reply)
        return pull.remaining == 0

    async def _wait(self) -> None:
        """Asks every class and waits, until a job came for every taker, or something went wrong."""
        group = self._pulls.new_group()
        waiting = await self._bus.subscribe(
            self._pulls.replies(group), lambda message: self._arrived(message, group), undecodable=True
        )
        try:
            while (wanted := self._wanted) and self._problem is None:
                for each in self._classes.values():
                    missing = wanted - self._pulls.requested(each)
                    if missing > 0:
                        self._pulls.send(each, group, missing, wait=True)
                self._changed.clear()
                if not await self._change(self._pulls.deadline):
                    self._problem = "pull requests are not answered"
        finally:
            self._pulls.clear()
            _in_background(self._ending, self._end(waiting))

    async def _end(self, waiting: Subscription) -> None:
        """Ends a subscription, and its requests with it, once what was sent to it is here."""
        await asyncio.sleep(HOLD_BACK)
        await waiting.unsubscribe()

    async def _change(self, deadline: float) -> bool:
        """Waits for anything to happen; False when the deadline passed before."""
        try:
            async with asyncio.timeout(max(0.0, deadline - self._clock())):
                await self._changed.wait()
        except TimeoutError:
            return False
        return True

    def _arrived(self, message: Message, group: str = _PROBE) -> None:
        self._changed.set()
        ack = AckSubject.parse(message.reply)
        if ack is None:
            self._on_status(message)
            return
        self._answered()
        priority_class = self._by_consumer.get((ack.stream, ack.consumer))
        self._pulls.delivered(priority_class, group)
        if self.heartbeats.again(ack, message.reply):
            log.warning("jobs.delivered_again", sequence=ack.sequence, attempt=ack.attempt)
            self._look.set()
            return
        if self._suspect_for > 0:
            log.warning("jobs.too_old", sequence=ack.sequence, attempt=ack.attempt)
            return
        if priority_class is not None:
            self._fair.picked(priority_class.job_class)
            self._reordering.arrived(priority_class.job_class)
        self._give(NatsDelivery(self._bus, message, ack, self.heartbeats))

    def _give(self, delivery: NatsDelivery) -> None:
        # What was on its way when the queue was paused goes back with what is held.
        while self._takers and not self._paused:
            taker = self._takers.popleft()
            if not taker.done():
                taker.set_result(delivery)
                return
        self._hold(delivery)

    def _hold(self, delivery: NatsDelivery) -> None:
        """Keeps a job for the next taker, for a while; not at all where no taker will come."""
        self._held.append(delivery)
        if self._quiet.is_set() and (self._stopped or self._paused):
            self._return(delivery)
        else:
            asyncio.get_running_loop().call_later(HELD, self._return, delivery)

    def _return(self, delivery: NatsDelivery) -> None:
        if delivery in self._held:
            _in_background(self._returning, self._hand_back([delivery]))

    def _on_status(self, message: Message) -> None:
        """The server ended a pull request, or reports that it is alive."""
        status = message.status
        if status == IDLE_HEARTBEAT:
            return
        was_open = self._pulls.end(message.subject)
        if status in (NO_MESSAGES, REQUEST_TIMEOUT):
            self._answered()
        elif was_open:
            self._problem = message.description or f"status {status}"

    def _answered(self) -> None:
        """The consumers are there."""
        if self._failures:
            log.info("jobs.pulling_again", classes=list(self._classes))
        self._failures = 0

    async def _recover(self) -> None:
        """After a fault: consumers that are missing are made again; then a pause, longer every time."""
        problem, self._problem = self._problem, None
        self._pulls.clear()
        self.troubles += 1
        self._failures += 1
        try:
            for each in self._classes.values():
                await self._info(each)
        except ApiError as error:
            problem = error.message
            if error.err_code in (CONSUMER_NOT_FOUND, STREAM_NOT_FOUND):
                problem = await self._recreated(problem)
        except BusUnavailable as error:
            problem = error.message
        if self._clock() - self._logged >= LOG_INTERVAL and self._failures > 1:
            self._logged = self._clock()
            log.error("jobs.not_pulling", reason=problem, failures=self._failures)
        pause = min(BACKOFF_FIRST * 2.0 ** min(self._failures - 1, 16), BACKOFF_LAST)
        # Only `stop` and `pause` end it early.
        await self._rest(pause * random.uniform(0.75, 1.25))  # noqa: S311  # jitter

    async def _recreated(self, problem: str) -> str:
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


def _in_background(tasks: set[asyncio.Task[None]], work: Coroutine[None, None, None]) -> None:
    """Starts work, and keeps its task in a set until it has ended."""
    task = asyncio.create_task(work)
    tasks.add(task)
    task.add_done_callback(tasks.discard)
