"""The stream of a durable job: its chunks as they come, and as they are stored.

A reader subscribes, which is fast, and reads what is stored only where that is not enough: for what came
before it, for what was lost on the way, and whenever nothing has come for a while. Where chunks are stored
no more, the final result takes their place.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec

from inferbus.schemas.errors import BusUnavailable
from inferbus.workers.bus.connection.bus import Bus
from inferbus.workers.bus.connection.message import Message
from inferbus.workers.bus.connection.subscription import Subscription
from inferbus.workers.bus.errors import NOT_FOUND, ApiError, NotPermitted
from inferbus.workers.bus.interface import Stored
from inferbus.workers.bus.jetstream import layout
from inferbus.workers.bus.jetstream.client import JetStream
from inferbus.workers.client.assembler import Event, Restarted
from inferbus.workers.client.errors import TimedOut
from inferbus.workers.client.jobs import Job, stop
from inferbus.workers.client.messages import Chunk, read, submission
from inferbus.workers.client.results import FIRST_LOOK, LAST_LOOK, Results
from inferbus.workers.client.stream import Stream

Spawn = Callable[[Coroutine[Any, Any, None]], None]


class JobStream(Stream[Chunk | Restarted]):
    """The answer to a durable job, from its beginning, whenever it is read.

    Leaving it early does not stop the job; `cancel` does.
    """

    def __init__(
        self,
        bus: Bus,
        job: Job,
        *,
        timeout: float | None,
        spawn: Spawn,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(job.id, clock=clock)
        self._bus = bus
        self._job = job
        self._timeout = timeout
        self._spawn = spawn
        self._results = Results(bus)
        self._subject = bus.subjects.stream(job.owner, job.id)
        self._subscription: Subscription | None = None
        self._pause = FIRST_LOOK
        self._next_look = self._heard = self.started

    async def _more(self) -> list[Event]:
        if self._subscription is None:
            # The queue's method, not one of this object: a stream that nobody holds any more must go.
            self._subscription = await self._bus.subscribe(self._subject, self._arrived.put_nowait)
            events = await self._look(first=True)
            self.replayed = bool(events)
            return events
        wait = self._pause
        if self._incomplete:
            wait = max(self._next_look - self._clock(), 0.0)
        try:
            message = await self._receive(wait)
        except TimeoutError:
            return await self._look()
        events = self._take(message)
        if self._incomplete and self._clock() >= self._next_look:
            events += await self._look()
        return events

    @property
    def _incomplete(self) -> bool:
        """Whether something is known to be stored that did not arrive."""
        return self._assembler.missing or self._assembler.decided

    def _take(self, message: Message | Stored) -> list[Event]:
        named = submission(message.headers)
        if named is not None:
            if self._job.submission is None:
                self._job = msgspec.structs.replace(self._job, submission=named)
            if named != self._job.submission:
                return []
        self._heard = self._clock()
        found = read(message.data, message.headers)
        return [] if found is None else self._assembler.take(found)

    async def _look(self, *, first: bool = False) -> list[Event]:
        """Looks at what is stored; less often when that is of no use."""
        events: list[Event] = []
        heard = self._heard
        try:
            events = await self._stored()
        except BusUnavailable as problem:
            # Away for now, or for good?
            fatal = first and self._bus.settled
            if fatal or self._bus.closed.is_set() or isinstance(problem, NotPermitted):
                raise
        if not events:
            self._heard = heard
        self._pause = FIRST_LOOK if events else min(self._pause * 2, LAST_LOOK)
        self._next_look = self._clock() + self._pause
        if self.outcome is None and self._timeout is not None and self._clock() - self._heard > self._timeout:
            raise TimedOut(f"nothing came for {self._timeout:g} s; the job goes on")
        return events

    async def _stored(self) -> list[Event]:
        history = await self._history()
        if self._job.submission is None:
            newest = max((submission(stored.headers) or 0 for stored in history), default=0)
            self._job = msgspec.structs.replace(self._job, submission=newest or None)
        events = [event for stored in history for event in self._take(stored)]
        if self.outcome is None and (result := await self._results.find(self._job)) is not None:
            events += self._assembler.finish(result)
        return events

    async def _history(self) -> list[Stored]:
        try:
            return await JetStream(self._bus).read(layout.STREAM, self._subject)
        except ApiError as problem:
            if problem.status != NOT_FOUND:
                raise
            # In the server's memory alone, it goes with the server; the results do not.
            return []

    async def _cancel(self) -> None:
        await stop(self._bus, self._job)

    async def _leave(self) -> None:
        self._forget()

    def __del__(self) -> None:
        if not getattr(self, "_left", True):
            self._left = True
            self._forget()

    def _forget(self) -> None:
        """In the background: leaving a subscription in good order takes a moment."""
        subscription, self._subscription = self._subscription, None
        if subscription is not None and not self._bus.closed.is_set():
            self._spawn(subscription.unsubscribe())
