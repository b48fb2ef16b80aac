"""How requests come in: live ones from a queue group, durable ones by pulling; only with a permit."""

from __future__ import annotations

import asyncio
import datetime as dt
import secrets
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Final, Protocol

import msgspec
import structlog

from inferbus.schemas import headers, limits
from inferbus.schemas.errors import (
    BusUnavailable,
    CallerError,
    Draining,
    InternalError,
    InvalidSubject,
    Misdirected,
    Overloaded,
    PayloadTooLarge,
)
from inferbus.workers import tracing
from inferbus.workers.admission import BATCH, LIVE, Admission, Permit, ServiceClass
from inferbus.workers.bus.connection.message import Callback, Message
from inferbus.workers.bus.connection.subscription import Subscription
from inferbus.workers.bus.interface import Delivery, Stored
from inferbus.workers.jobs.attempt import Envelope, facts, live
from inferbus.workers.jobs.bundle import is_bundle
from inferbus.workers.jobs.delivery import Deliveries
from inferbus.workers.jobs.outcome import AttemptOutcome
from inferbus.workers.jobs.reply import error_body
from inferbus.workers.jobs.retained import RetainedAnswer
from inferbus.workers.jobs.runner import AttemptRunner
from inferbus.workers.jobs.scope import Scope
from inferbus.workers.jobs.settings import JobSettings
from inferbus.workers.jobs.storage import Storage
from inferbus.workers.observe import defects

log = structlog.get_logger()

REJOIN: Final = 1.0
"""Seconds before the queue group is joined again where that failed."""


class Tasks:
    """The tasks of running requests: kept, so that none is lost, and waited for."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return len(self._tasks)

    def start(self, work: Coroutine[Any, Any, None]) -> None:
        """Runs a request."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    async def settled(self) -> None:
        """Waits until none is left."""
        while self._tasks:
            await asyncio.wait(self._tasks)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (problem := task.exception()) is not None:
            log.error("request.defect", exc_info=problem)


class LiveIntake:
    """Takes live requests while there are free slots.

    A worker that is full leaves the queue group: others get its share, and where all are full the caller
    gets "no responders" at once instead of waiting for a timeout. A request that was under way already is
    refused.

    Args:
        subscribe: Joins the queue group with a callback.
        runner: Makes the attempt, or refuses it.
        tasks: Keeps what runs.
        admission: Bounds what is taken.
        settings: Of the worker.
        pass_on: Sends a request to another worker, which is named.
        now: Wall clock, aware.
    """

    def __init__(
        self,
        subscribe: Callable[[Callback], Awaitable[Subscription]],
        runner: AttemptRunner,
        tasks: Tasks,
        admission: Admission,
        settings: JobSettings,
        *,
        pass_on: Callable[[Envelope, str], None] = lambda envelope, worker: None,
        now: Callable[[], dt.datetime] = lambda: dt.datetime.now(dt.UTC),
    ) -> None:
        self._subscribe = subscribe
        self._runner = runner
        self._tasks = tasks
        self._admission = admission
        self._settings = settings
        self._pass_on = pass_on
        self._now = now
        self._changed = asyncio.Event()
        admission.on_change(self._changed.set)
        self._draining = False
        self._joined: Subscription | None = None

    async def join(self) -> None:
        """Joins the queue group; on return, requests arrive."""
        self._joined = await self._subscribe(self._received)

    async def run(self) -> None:
        """Leaves the queue group and joins it again as slots come and go, until `drain`."""
        while not self._draining:
            self._changed.clear()
            try:
                if self._joined is None and not self._admission.full:
                    await self.join()
                elif self._joined is not None and self._admission.full:
                    await self._leave()
            except BusUnavailable as error:
                log.warning("requests.not_joined", reason=error.message)
                with suppress(TimeoutError):
                    async with asyncio.timeout(REJOIN):
                        await self._changed.wait()
                continue
            await self._changed.wait()
        await self._leave()

    def drain(self) -> None:
        """Takes nothing more; `run` returns."""
        self._draining = True
        self._changed.set()

    async def _leave(self) -> None:
        joined, self._joined = self._joined, None
        if joined is not None:
            await joined.unsubscribe()

    def passed_on(self, message: Message) -> None:
        """A request that another worker passed on to this one; a full worker refuses it."""
        self._received(message, passed=True)

    def _received(self, message: Message, *, passed: bool = False) -> None:
        if message.forwarded:
            log.warning("request.forwarded", subject=message.subject)
            return
        stored = Stored(
            subject=message.subject,
            data=message.data,
            headers=message.headers,
            sequence=0,
            time=self._now(),
        )
        try:
            envelope = live(
                stored,
                reply=message.reply,
                fallback_id=secrets.token_hex(16),
                subjects=self._settings.subjects,
                replies=self._settings.replies,
                passed=passed,
            )
        except CallerError as error:
            log.warning("request.unanswerable", subject=message.subject, code=error.code)
            return
        if self._draining:
            self._runner.refuse(envelope, Draining("this worker is shutting down"))
        elif (permit := self._admission.take(LIVE)) is None:
            self._runner.refuse(envelope, Overloaded("all slots of this worker are busy"))
        else:
            # Not in the task: a cancel may be handled before its first step.
            scope = Scope(envelope.attempt.key, submission=None, stored=stored.time)
            forget = self._runner.scopes.add(scope)
            self._tasks.start(self._serve(envelope, permit, scope, forget, self._retained(envelope)))

    def _retained(self, envelope: Envelope) -> RetainedAnswer | None:
        """Where the answer is kept; None for a caller that would not ask for it."""
        token = envelope.headers.get(headers.RESUME, "")
        if not 0 < len(token) <= limits.RESUME_CHARS:
            return None
        return self._runner.retained.open(envelope.attempt.job, token, envelope.attempt.reply)

    async def _serve(
        self,
        envelope: Envelope,
        permit: Permit,
        scope: Scope,
        forget: Callable[[], None],
        retained: RetainedAnswer | None,
    ) -> None:
        with permit:
            try:
                outcome = await self._runner.run(envelope, scope, permit=permit, retained=retained)
                if isinstance(outcome.error, Misdirected) and outcome.error.to:
                    self._pass_on(envelope, outcome.error.to)
                    log.info("request.passed_on", to=outcome.error.to, **facts(outcome.attempt))
                    return
                outcome = self._answered(outcome)
                log.info(
                    "request.finished", status=outcome.status, code=outcome.code, **facts(outcome.attempt)
                )
            except Exception:  # a supervision point: the caller hears of it, whatever fails
                defects.exception("request.defect", **facts(envelope.attempt))
                self._runner.refuse(envelope, InternalError("inferbus failed; the worker's log says how"))
            finally:
                forget()
                if retained is not None:
                    retained.close()

    def _answered(self, outcome: AttemptOutcome) -> AttemptOutcome:
        """Sends what is still to be sent; an answer that no message can hold is an error."""
        try:
            with tracing.span("publish", parent=outcome.span):
                outcome.answer()
            return outcome
        except PayloadTooLarge as problem:
            error = PayloadTooLarge(
                f"the whole answer has {len(outcome.body)} bytes: {problem.message}; "
                "ask for a stream, or submit a job"
            )
            body = error_body(outcome.attempt, error)
            outcome = msgspec.structs.replace(outcome, error=error, body=body)
            outcome.answer()
            return outcome


class JobSource(Protocol):
    """Where durable jobs are pulled from."""

    async def take(self) -> Delivery:
        """Waits for the next job."""
        ...

    async def stop(self) -> None:
        """Pulls nothing more, and hands back what was pulled and not taken."""
        ...


class JobIntake:
    """Pulls durable jobs as there is room for them.

    Args:
        source: Where from.
        deliveries: Take a job to its end.
        tasks: Keeps what runs.
        admission: Bounds what is pulled.
        settings: Of the worker.
    """

    def __init__(
        self,
        source: JobSource,
        deliveries: Deliveries,
        tasks: Tasks,
        admission: Admission,
        settings: JobSettings,
    ) -> None:
        self._source = source
        self._deliveries = deliveries
        self._tasks = tasks
        self._admission = admission
        self._settings = settings
        self._draining = asyncio.Event()
        self._unfed = 0
        self._fed = asyncio.Event()
        self._fed.set()

    async def run(self) -> None:
        """Pulls until `drain`."""
        while not self._draining.is_set():
            # The requests of a bundle come before further jobs, so that a worker holds one such bundle only.
            if not self._fed.is_set():
                await self._first(self._fed.wait())
            await self._first(self._admission.room.wait())
            if not self.storage.has_room.is_set():
                await self._first(self.storage.has_room.wait())
            pulling = asyncio.create_task(self._source.take())
            await self._first(pulling, self._admission.no_room.wait(), self.storage.has_no_room.wait())
            if not pulling.done():
                # A job that arrives at this moment is kept by the source for the next `take`.
                pulling.cancel()
            with suppress(asyncio.CancelledError, Draining):
                self._start(await pulling)

    def _start(self, delivery: Delivery) -> None:
        if not is_bundle(delivery.message):
            self._tasks.start(self._serve(delivery))
            return
        places = BundlePlaces(self._admission, self._class(delivery), self._draining, self._on_fed)
        self._unfed += 1
        self._fed.clear()
        self._tasks.start(self._serve_bundle(delivery, places))

    def _on_fed(self) -> None:
        self._unfed -= 1
        if not self._unfed:
            self._fed.set()

    async def drain(self) -> None:
        """Takes nothing more; hands back what has not started."""
        self._draining.set()
        await self._source.stop()

    @property
    def storage(self) -> Storage:
        """No job is pulled while answers wait for room in it."""
        return self._deliveries.storage

    async def _first(self, *conditions: Awaitable[Any]) -> None:
        """Waits for any of these, or for the end."""
        waiting = [asyncio.ensure_future(each) for each in (*conditions, self._draining.wait())]
        try:
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for each, condition in zip(waiting, (*conditions, None), strict=True):
                if each is not condition:
                    each.cancel()

    async def _serve(self, delivery: Delivery) -> None:
        with await self._admission.take_job(self._class(delivery)) as permit:
            await self._deliveries.handle(delivery, permit)

    async def _serve_bundle(self, delivery: Delivery, places: BundlePlaces) -> None:
        try:
            await self._deliveries.handle_bundle(delivery, places)
        finally:
            places.close()

    def _class(self, delivery: Delivery) -> ServiceClass:
        try:
            return self._settings.subjects.parse_job(delivery.message.subject, any_kind=True).job_class
        except InvalidSubject:
            return BATCH


class BundlePlaces:
    """Permits for the requests of one bundle; see `inferbus.workers.jobs.bundle.Places`.

    Args:
        admission: Gives them.
        service_class: Of the bundle.
        draining: No more are given once it is set.
        fed: Called once, when the last request has its permit.
    """

    def __init__(
        self,
        admission: Admission,
        service_class: ServiceClass,
        draining: asyncio.Event,
        fed: Callable[[], None],
    ) -> None:
        self._admission = admission
        self._class = service_class
        self._draining = draining
        self._fed: Callable[[], None] | None = fed

    @contextmanager
    def feeding(self) -> Iterator[None]:
        """While the block runs, the worker takes no further job."""
        try:
            yield
        finally:
            self.close()

    async def take(self) -> Permit | None:
        """A permit, as soon as there is room for another job; None: the worker is draining."""
        while not self._draining.is_set():
            if self._admission.room.is_set() and (permit := self._admission.take(self._class)):
                return permit
            waiting = [asyncio.ensure_future(each.wait()) for each in (self._admission.room, self._draining)]
            try:
                await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for each in waiting:
                    each.cancel()
        return None

    def close(self) -> None:
        """Lets the worker take further jobs."""
        fed, self._fed = self._fed, None
        if fed is not None:
            fed()
