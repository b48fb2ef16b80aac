"""A worker in virtual time: jobs and live requests go through the real admission into a modelled engine."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Coroutine, Mapping, Sequence
from typing import Final

import msgspec

from inferbus.workers.admission import LIVE, Admission, Budget, HeldPermit, ServiceClass, engine_priority
from inferbus.workers.bus.queue.fairness import Fair
from tests.simulation.scheduler import Engine, Request, Spec, Step

PULL: Final = 0.001
"""Seconds from asking for a job to having it."""

PREPARE: Final = 0.0005
"""Seconds of checking and tokenising."""


class Shape(msgspec.Struct, frozen=True):
    """Tokens of a request: of its prompt, of its answer, and that its answer may have."""

    prompt: int
    answer: int
    allowed: int


class Served(msgspec.Struct):
    """What became of one request; times in seconds from its arrival.

    Attributes:
        service_class: Its class.
        shape: Its tokens.
        arrived: Virtual time.
        tokens: That came.
        retractions: Of it, by the engine.
        waited: Seconds before it went to the engine.
        first: Until its first token.
        last: Until its last token; None where it was cancelled.
    """

    service_class: ServiceClass
    shape: Shape
    arrived: float
    tokens: int = 0
    retractions: int = 0
    waited: float = 0.0
    first: float | None = None
    last: float | None = None


class Worker:
    """Takes jobs while there is room for one, and live requests as they come.

    Args:
        spec: Of the engine.
        budget: Of the admission.
        jobs: By class, all of them queued from the beginning.
        weights: Of the classes.
    """

    def __init__(
        self,
        spec: Spec,
        budget: Budget,
        jobs: Mapping[ServiceClass, Sequence[Shape]],
        weights: Mapping[ServiceClass, int],
    ) -> None:
        loop = asyncio.get_running_loop()
        self.admission = Admission(budget, clock=loop.time)
        self.engine = Engine(spec, planned=self._planned)
        self.queues = {name: deque(shapes) for name, shapes in jobs.items()}
        self.served: list[Served] = []
        self.taken: list[ServiceClass] = []
        self.steps: list[Step] = []
        self.refused = 0
        self.longest_queue = 0
        self.idle_steps: list[int] = []
        self._fair = Fair({name: weights[name] for name in jobs})
        self._tasks: list[asyncio.Task[None]] = []

    async def take_jobs(self) -> None:
        """Takes jobs until none is queued."""
        while any(self.queues.values()):
            await self.admission.room.wait()
            await asyncio.sleep(PULL)
            order = sorted(self.queues, key=self._fair.order().index)
            name = next(each for each in order if self.queues[each])
            self._fair.picked(name)
            self.taken.append(name)
            self.job(name, self.queues[name].popleft())

    def live(self, shape: Shape) -> asyncio.Task[None] | None:
        """A live request arrives; None where it is refused."""
        permit = self.admission.take(LIVE)
        if permit is None:
            self.refused += 1
            return None
        return self._start(self._serve(permit, shape))

    def job(self, service_class: ServiceClass, shape: Shape) -> asyncio.Task[None]:
        """A job was delivered."""
        return self._start(self._job(service_class, shape))

    async def settled(self) -> None:
        """Waits until everything that was taken has ended."""
        while waiting := [task for task in self._tasks if not task.done()]:
            await asyncio.wait(waiting)
        for task in self._tasks:
            if not task.cancelled():
                task.result()

    def _start(self, serving: Coroutine[None, None, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(serving)
        self._tasks.append(task)
        return task

    async def _job(self, service_class: ServiceClass, shape: Shape) -> None:
        await self._serve(await self.admission.take_job(service_class), shape)

    async def _serve(self, permit: HeldPermit, shape: Shape) -> None:
        loop = asyncio.get_running_loop()
        served = Served(permit.service_class, shape, loop.time())
        self.served.append(served)
        done = loop.create_future()

        def token() -> None:
            if served.first is None:
                served.first = loop.time() - served.arrived
                permit.first_token()
            served.tokens += 1
            permit.generated(1)
            for _ in range(request.retractions - served.retractions):
                permit.retracted()
            served.retractions = request.retractions
            if served.tokens == shape.answer:
                served.last = loop.time() - served.arrived
                permit.finished()
                done.set_result(None)

        priority = engine_priority(permit.service_class, None)
        request = Request(shape.prompt, shape.answer, shape.allowed, priority=priority, token=token)
        try:
            await asyncio.sleep(PREPARE)
            certain = shape.answer == shape.allowed
            await permit.enter(shape.prompt, shape.allowed, certain=certain)
            served.waited = permit.waited
            self.engine.send(request)
            await done
        except asyncio.CancelledError:
            self.engine.abort(request)
            raise
        finally:
            permit.close()

    def _planned(self, step: Step) -> None:
        self.steps.append(step)
        self.longest_queue = max(self.longest_queue, self.engine.scheduler.queued_tokens)
        if step.unused and not step.lacks_kv and any(self.queues.values()):
            self.idle_steps.append(len(self.steps))
