"""One worker process: the product's own objects, put together as `inferbus.workers.roles.wiring` does it."""

from __future__ import annotations

import asyncio
import contextlib
import datetime as dt
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import aclosing
from contextvars import ContextVar
from typing import TYPE_CHECKING, Final

from inferbus.schemas import headers
from inferbus.schemas.errors import BusUnavailable, Draining
from inferbus.schemas.subjects import JobClass
from inferbus.workers.admission import Admission, Budget, Permit
from inferbus.workers.bus.interface import Delivery
from inferbus.workers.bus.jetstream.clock import ServerClock
from inferbus.workers.engine.interface import Delta, Leg
from inferbus.workers.engine.scripted import ScriptedEngine
from inferbus.workers.jobs.cancel import Cancels
from inferbus.workers.jobs.delivery import Deliveries
from inferbus.workers.jobs.retry import RetryPolicy
from inferbus.workers.jobs.runner import AttemptRunner, Work
from inferbus.workers.jobs.settings import JobSettings
from inferbus.workers.pairing.legs import Alone, RunningLeg
from inferbus.workers.roles.answering import Answering
from inferbus.workers.roles.intake import JobIntake, Tasks
from inferbus.workers.roles.program import finished_within
from tests.simulation.jobs import KILLER, KILLS_AFTER, script
from tests.simulation.taking import Heartbeats, SimulatedDelivery, SimulatedQueue
from tests.support.simulated import SUBJECTS, Connection
from tests.support.virtual import Loop

if TYPE_CHECKING:
    from tests.simulation.world import World

WEIGHTS: Final[Mapping[JobClass, int]] = {"interactive": 4, "batch": 1}
DEAF: Final = 30.0
"""Seconds within which a worker that is well has heard of a cancel, however slow the network is."""


HANDLED: ContextVar[SimulatedDelivery] = ContextVar("HANDLED")
"""The delivery on whose behalf something is done."""


class _Watched(Deliveries):
    """The product's; drops a delivery that was not ended, which over NATS is the garbage collector's work."""

    open: set[SimulatedDelivery]

    async def handle(self, delivery: Delivery, permit: Permit | None = None) -> None:
        assert isinstance(delivery, SimulatedDelivery)
        self.open.add(delivery)
        HANDLED.set(delivery)
        try:
            await super().handle(delivery, permit)
        finally:
            delivery.drop()
            self.open.remove(delivery)


class Worker:
    """One worker process.

    Attributes:
        state: `up`, `draining`, `gone` (in good order) or `dead`.
        over: When its grace period was over: nothing begins after that.
    """

    def __init__(self, world: World, number: int) -> None:
        self.world = world
        self.number = number
        self.name = f"w{number}"
        self.loop = Loop(world.time)
        self.state = "up"
        self.over: float | None = None
        self.connection = Connection(
            world.server,
            self.loop,
            latency=world.latency,
            buffering=world.buffering,
            max_payload=world.max_payload,
        )
        self.connection.sending = self._sending
        self.engine = ScriptedEngine(script(number))
        self._alone = Alone(self.engine)
        self._answer = Answering(self.engine, self._run)
        settings = JobSettings(
            worker=self.name,
            subjects=SUBJECTS,
            policy=RetryPolicy(attempts=world.attempts, jitter=0.0),
            window=world.server.window,
        )
        now, clock = world.time.wall, self._clock() if world.skew else None
        if clock is not None:
            now = clock.now
        self.runner = AttemptRunner(self.connection, self._begin, settings, now=now)
        self._cancels = cancels = Cancels(self.connection, self.runner.scopes, SUBJECTS)
        self.connection.on_cancel = cancels.arrived
        self.connection.listeners.append(self._connection_changed)
        self.deliveries = _Watched(self.connection, self.runner, cancels, settings, clock=self.loop.time)
        self.deliveries.open = set()
        self.signs = Heartbeats(self.connection, ack_wait=world.server.ack_wait)
        self.queue = SimulatedQueue(self.connection, self.signs, WEIGHTS)
        budget = Budget(slots=world.slots, kv_tokens=10**6, window=10**5, staged=10**4, live_share=0.0)
        self.admission = Admission(budget, clock=self.loop.time)
        self.tasks = Tasks()
        self.intake = JobIntake(self.queue, self.deliveries, self.tasks, self.admission, settings)
        self._running = [self.loop.create_task(self._take(clock)), self.loop.create_task(self.signs.run())]
        self.hurry = asyncio.Event()

    @property
    def idle(self) -> bool:
        """Whether it has nothing to do."""
        return not len(self.tasks) and not self.queue.held and not self.deliveries.open

    def drain(self, grace: float) -> None:
        """As on SIGTERM."""
        if self.state == "up":
            self.state = "draining"
            self._running.append(self.loop.create_task(self._drain(grace)))
        elif self.state == "draining":
            self.loop.call_soon(self.hurry.set)

    def stall(self, seconds: float) -> None:
        """Stands still."""
        if self.state in ("up", "draining"):
            self.loop.frozen = True
            self.world.time.after(seconds, self.resume)

    def resume(self) -> None:
        """Goes on, whether or not it should have stood still for longer."""
        if self.state in ("up", "draining") and self.loop.frozen:
            self.loop.frozen = False
            self.connection.undisturbed = self.world.time.now

    def crash(self, *, lost: bool = False) -> None:
        """As by SIGKILL, or by the loss of its machine, with what was on its way."""
        if self.state in ("up", "draining"):
            self.state = "dead"
            self._end(lost=lost)

    def _end(self, *, lost: bool) -> None:
        self.connection.close(lost=lost)
        self.loop.end()

    def _clock(self) -> ServerClock:
        """The server's, for a worker whose own is wrong: every other one's is behind."""
        time, connection = self.world.time, self.connection
        skew = dt.timedelta(seconds=self.world.skew * (-1) ** self.number)
        return ServerClock(
            lambda: connection.request(time.wall), wall=lambda: time.wall() + skew, monotonic=self.loop.time
        )

    async def _take(self, clock: ServerClock | None) -> None:
        """As `inferbus.workers.roles.worker`: it knows the server's clock before it takes anything."""
        while clock is not None:
            with contextlib.suppress(BusUnavailable):
                await clock.measure()
                self._running.append(self.loop.create_task(clock.follow()))
                break
        await self.intake.run()

    async def _drain(self, grace: float) -> None:
        """As `inferbus.workers.roles.decode.DecodeProgram.drain`."""
        await self.intake.drain()
        await self._running[0]
        if not await finished_within(self.tasks.settled(), grace=grace, hurry=self.hurry):
            self.over = self.world.time.now
            self.runner.scopes.end_all(Draining("this worker is shutting down"))
            await self.tasks.settled()
        self.connection.listeners.remove(self._connection_changed)
        await self.tasks.settled()
        with contextlib.suppress(Exception):
            await self.connection.flush()
        self.world.time.at(self.world.time.now, self._gone)

    def _gone(self) -> None:
        if self.state == "draining":
            self.world.check_at_rest(self)
            self.state = "gone"
            self._end(lost=False)

    def _connection_changed(self, up: bool) -> None:
        """As `inferbus.workers.roles.decode.DecodeProgram`."""
        if up:
            self.tasks.start(self._cancels.catch_up())

    async def _begin(self, work: Work) -> bytes:
        self.world.began(self, work)
        return await self._answer(work)

    @contextlib.asynccontextmanager
    async def _run(self, leg: Leg, job: str) -> AsyncIterator[RunningLeg]:
        async with self._alone(leg, job) as running, aclosing(self._killing(leg, running.deltas)) as deltas:
            yield RunningLeg(deltas=deltas)

    async def _killing(self, leg: Leg, deltas: AsyncGenerator[Delta, None]) -> AsyncGenerator[Delta, None]:
        count = 0
        async for delta in deltas:
            if leg.options.get("user") == KILLER and count == KILLS_AFTER:
                self.world.time.at(self.world.time.now, lambda: self.world.killed(self))
                await asyncio.Event().wait()
            count += 1
            yield delta

    def _sending(self, subject: str, data: bytes, found: Mapping[str, str]) -> None:
        """Whatever is said of a job must be said by one who has it, as far as he can know."""
        if headers.SUBMISSION not in found:
            return
        world, number = self.world, int(found[headers.SUBMISSION])
        if headers.BEGUN in found:
            # Taken back by a worker that has lost touch; readers do not hear of it.
            world.given_up[number] += 1
            return
        attempt = int(found[headers.ATTEMPT])
        delivery = HANDLED.get()
        if delivery not in self.deliveries.open or delivery.ended or delivery.out_of_touch:
            world.wrong(f"{self.name} speaks of {number}, attempt {attempt}, which it does not hold any more")
        elif world.server.deliveries[number] > delivery.attempt and delivery.epoch == self.connection.epoch:
            # A sign of life may be lost with the connection, and its sender does not know.
            world.wrong(f"{self.name} speaks of {number}, attempt {attempt}, which was delivered again")
        if b'"retrying"' in data:
            world.given_up[number] += 1
        deaf = world.time.now - DEAF
        if b'"seq":' in data and self.connection.undisturbed < deaf:
            job = world.submissions[number]
            if any(cancel.aims_at(job) and cancel.time < deaf for cancel in world.cancels):
                world.wrong(f"{self.name} goes on with {number}, which was cancelled")
