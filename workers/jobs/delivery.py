"""The delivery contract of durable jobs: `HeldJob` is its table, before an attempt and after it.

    taken      → result there already?      readers are told of it; acknowledged
               → taken over meanwhile?      leave it to its new owner
               → a repeated submission?     the result that it has already, again
               → workers died of it?        last attempts are made alone; after those, dead letter
               → cancelled while queued?    cancelled, without touching the engine
    succeeded  → result stored once → end mark → acknowledged
    caller's fault, cancelled, expired → the same, with the error as the result
    taken over → leave it to its new owner
    draining   → handed back at once
    misdirected → handed back after a short delay, for another worker that can serve it
    failed     → tried again after a growing delay; after the last attempt: dead letter → result → terminated

The final result is stored before the job is acknowledged, and only if no
other owner has stored one since this attempt began; so a job ends in exactly
one result however often it was delivered.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Final, cast

import msgspec
import structlog

from inferbus.schemas import headers
from inferbus.schemas.errors import (
    AttemptsExhausted,
    BusUnavailable,
    CallerError,
    Draining,
    Ended,
    InferbusError,
    InternalError,
    InvalidRequest,
    LeaseLost,
    Misdirected,
    NotSupported,
    PayloadTooLarge,
)
from inferbus.schemas.objects import ObjectRef, object_header, parse_object
from inferbus.workers import tracing
from inferbus.workers.admission import Permit
from inferbus.workers.bus.interface import Broker, Delivery, ObjectStore, Stored
from inferbus.workers.jobs import cancel
from inferbus.workers.jobs.attempt import Attempt, Envelope, durable, facts, unaddressed
from inferbus.workers.jobs.beginnings import Beginnings, Begun
from inferbus.workers.jobs.bundle import HeldBundle, Places
from inferbus.workers.jobs.cancel import Cancels
from inferbus.workers.jobs.dead_letters import DeadLetters
from inferbus.workers.jobs.duplicate import origin
from inferbus.workers.jobs.fields import number, without_nats
from inferbus.workers.jobs.history import History
from inferbus.workers.jobs.observer import Observer, Settlement
from inferbus.workers.jobs.outcome import AttemptOutcome
from inferbus.workers.jobs.quarantine import LAST_ATTEMPTS, Quarantine
from inferbus.workers.jobs.reply import Reply, Served, error_body, served_headers
from inferbus.workers.jobs.results import FinalResult, ResultStore
from inferbus.workers.jobs.runner import AttemptRunner
from inferbus.workers.jobs.scope import Scope
from inferbus.workers.jobs.settings import JobSettings
from inferbus.workers.jobs.storage import Storage
from inferbus.workers.observe import defects

log = structlog.get_logger()

DEFERRED: Final = 5.0
"""Seconds after which a job that found the quarantine occupied comes again, here or elsewhere. A job for
another worker waits no longer either: it may come here several times."""

EVENTS: Final[dict[Settlement, tuple[int, str]]] = {
    "finished": (logging.INFO, "job.finished"),
    "retried": (logging.WARNING, "job.retried"),
    "handed_back": (logging.INFO, "job.handed_back"),
    "deferred": (logging.INFO, "job.deferred"),
    "dead": (logging.ERROR, "job.dead"),
    "repeated": (logging.INFO, "job.acknowledged"),
    "left": (logging.WARNING, "job.left"),
}
"""How each end of a delivery is logged."""


class Deliveries:
    """Keeps the contract for the deliveries of one worker.

    Args:
        broker: Where results, replies and dead letters go.
        runner: Makes the attempts.
        cancels: Knows which jobs their owners cancelled.
        settings: Of the worker.
        observer: Told what became of each delivery.
        objects: Holds bodies over the payload limit; None: there are none.
        clock: Monotonic seconds.

    Attributes:
        storage: Outlasts outages; its `full` says why no more jobs are to be taken.
        results: Stored ones.
        dead_letters: Stores them.
        beginnings: Counts attempts.
        quarantine: Of last attempts.
        history: Chunks of earlier attempts.
    """

    def __init__(
        self,
        broker: Broker,
        runner: AttemptRunner,
        cancels: Cancels,
        settings: JobSettings,
        *,
        observer: Observer | None = None,
        objects: ObjectStore | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.broker = broker
        self.runner = runner
        self.cancels = cancels
        self.settings = settings
        self.observer = observer or Observer()
        self.objects = objects
        self.storage = Storage(clock)
        self.results = ResultStore(broker, settings, self.storage)
        self.dead_letters = DeadLetters(broker, settings, self.storage)
        self.beginnings = Beginnings(broker, settings, self.storage)
        self.quarantine = Quarantine()
        self.history = History(broker, settings.subjects)

    async def handle(self, delivery: Delivery, permit: Permit | None = None) -> None:
        """Takes one delivery to its acknowledgement, or gives it back.

        Where NATS is away the job is left alone: it will be delivered again, and the result that may be
        stored already is found then.

        Args:
            delivery: The job.
            permit: Has it run when its turn comes; at once without one.
        """
        await self._held(delivery, permit, HeldJob.handle)

    async def handle_bundle(self, delivery: Delivery, places: Places) -> None:
        """Takes one delivery of several requests in one job to its acknowledgement; see `bundle`.

        Args:
            delivery: The job.
            places: Has each request run when its turn comes.
        """

        async def handle(job: HeldJob) -> None:
            bundle = HeldBundle(
                self.broker,
                self.runner,
                self.cancels,
                self.results,
                self.beginnings,
                self.settings,
                delivery,
                job.envelope,
            )
            stored = await bundle.handle(places)
            if stored is None:
                job.settled("repeated", reason="its result is stored, or another worker has it")
                return
            reply, body = stored
            if reply:
                self.broker.send(reply, body)
            job.settled("finished", status="ok", code=None)

        await self._held(delivery, None, handle)

    async def _held(
        self, delivery: Delivery, permit: Permit | None, handle: Callable[[HeldJob], Awaitable[None]]
    ) -> None:
        message, settings = delivery.message, self.settings
        try:
            if message.forwarded:
                raise InvalidRequest("the server sent it here on somebody's behalf; its owner did not")
            if message.undecodable is not None:
                raise InvalidRequest("its subject or headers are no text")
            envelope = durable(
                message, number=delivery.attempt, subjects=settings.subjects, replies=settings.replies
            )
        except CallerError as error:
            await self.bury_unaddressed(delivery, error)
            return
        job = HeldJob(self, delivery, envelope, permit)
        try:
            try:
                await handle(job)
            except BusUnavailable:
                raise
            except Exception:  # a supervision point: whatever fails, the job must not stay here
                defects.exception("job.defect", **facts(job.attempt))
                await job.broke()
        except BusUnavailable as error:
            job.settled("left", error, reason=error.message)
        except Exception:  # another one: the same defect may keep it from being tried again, or buried
            defects.exception("job.defect", **facts(job.attempt))
            await delivery.nak(settings.policy.longest)

    async def bury_unaddressed(self, delivery: Delivery, error: InferbusError) -> None:
        """A job whose owner or id cannot be read, or is not to be believed: a dead letter, without a result.

        Where there is no room for it the job stays in the queue.

        Args:
            delivery: The job.
            error: Why it cannot be read.
        """
        settings = self.settings
        attempt = unaddressed(delivery.message, number=delivery.attempt, subjects=settings.subjects)
        settlement: Settlement = "dead"
        try:
            await self.dead_letters.store(attempt, delivery.message, error, waits=False)
            await delivery.term(error.code)
        except BusUnavailable as problem:
            settlement, error = "left", problem
        level, event = EVENTS[settlement]
        log.log(level, event, code=error.code, reason=error.message, **facts(attempt))
        self.observer.settled(attempt, settlement, error)


class HeldJob:
    """One delivery of one job, from taking it to its end.

    Args:
        parts: What all deliveries of the worker share.
        delivery: This one.
        envelope: The job as it came.
        permit: Has it run when its turn comes; at once without one.
    """

    def __init__(
        self, parts: Deliveries, delivery: Delivery, envelope: Envelope, permit: Permit | None
    ) -> None:
        self._parts = parts
        self._delivery = delivery
        self.envelope = envelope
        self._permit = permit
        self._begun = 0
        self._counted = False
        self._body_apart: ObjectRef | None = None

    @property
    def attempt(self) -> Attempt:
        """The attempt that this delivery is about, as far as the headers need not be read for it."""
        return self.envelope.attempt

    async def handle(self) -> None:
        """The table, before an attempt.

        Raises:
            BusUnavailable: NATS is away, or was for too long.
        """
        result, in_order = await self._look_up()
        if result.stored:
            await self._tell_readers(result.own)
            await self._forget_attempts()
            await self._delivery.ack()
            self.settled("repeated", reason="its result is stored")
        elif self._delivery.stale:
            self.settled("left", reason="another worker may have taken it over")
        elif (earlier := await self._answered_before(result)) is not None:
            await self._answer_again(result, earlier)
        else:
            await self._fetch_body()
            await self._begin(result, in_order=in_order)

    async def _begin(self, result: FinalResult, *, in_order: bool) -> None:
        """The table, before an attempt at a job that has no result."""
        policy = self._parts.settings.policy
        if self._begun == 0 or not policy.last(self._begun + 1):
            await self._try(result)
        elif policy.attempts == 1:
            await self._give_up(result, "it came once more after its only attempt")
        elif in_order:
            await self._try(result)
        else:
            await self._try_last(result)

    async def broke(self) -> None:
        """After a defect outside of the attempt: tries the job again, or gives it up, as after any failure.

        Raises:
            BusUnavailable: NATS is away, or was for too long.
        """
        if not self._counted:
            self._begun = (await self._parts.beginnings.of(self.attempt)).attempts
        error = InternalError("inferbus failed; the worker's log says how")
        result = await self._parts.results.of(self.attempt)
        await self._settle(result, self._parts.runner.failed(self.attempt, error))

    async def _settle(self, result: FinalResult, outcome: AttemptOutcome) -> None:
        """The table, after an attempt."""
        policy, error, attempt = self._parts.settings.policy, outcome.error, outcome.attempt
        if self._delivery.forgotten:
            # Another attempt may have the same number: readers could not tell its chunks from this result.
            self.settled("left", reason="the server may have forgotten that this worker took it")
        elif error is None or isinstance(error, CallerError | Ended):
            outcome = await self._conclude(result, outcome)
            await self._forget_attempts()
            await self._delivery.ack()
            await self._remove_body()
            self.settled("finished", outcome.error, status=outcome.status, code=outcome.code)
        elif self._delivery.stale or isinstance(error, LeaseLost):
            # Handing it back would take it from its new owner.
            self.settled("left", error, reason=error.message)
        elif isinstance(error, Draining):
            outcome.reply.retrying(error)
            await self._delivery.nak(0.0)
            self.settled("handed_back", error)
        elif isinstance(error, Misdirected):
            # Readers are told nothing: nothing has begun.
            await self._delivery.nak(min(policy.delay(self._delivery.attempt), DEFERRED))
            self.settled("handed_back", error, reason=error.message)
        elif policy.last(self._begun + 1):
            await self._bury(result, outcome, error)
        else:
            if not self._counted:
                await self._parts.beginnings.count(attempt, self._begun)
            delay = policy.delay(self._begun + 1)
            outcome.reply.retrying(error)
            await self._delivery.nak(delay)
            self.settled("retried", error, code=error.code, reason=error.message, delay=delay)

    async def _look_up(self) -> tuple[FinalResult, bool]:
        """Where the result belongs, and whether the attempt before this one ended in order, if that is known.

        The attempt gets a number above all that readers have seen: a server that was killed may have
        forgotten deliveries. How many began before it is another figure: what readers have seen did, and what
        was counted.
        """
        parts = self._parts
        first = self._delivery.attempt == 1
        result, latest, begun = await asyncio.gather(
            parts.results.of(self.attempt),
            parts.history.latest(self.attempt),
            _nothing_begun() if first else parts.beginnings.of(self.attempt),
        )
        self._begun = max(begun.attempts, min(latest.number, 1))
        attempt = msgspec.structs.replace(self.attempt, number=max(self.attempt.number, latest.number + 1))
        self.envelope = msgspec.structs.replace(self.envelope, attempt=attempt)
        return result, latest.ended_in_order and begun.newest <= latest.number

    async def _try(self, result: FinalResult) -> None:
        """One attempt. It is counted, unless it is the first of several: see `beginnings`."""
        parts, scope = self._parts, self._scope()
        self._counted = self._delivery.attempt > 1 or parts.settings.policy.attempts == 1
        forget = parts.runner.scopes.add(scope)
        try:
            if await parts.cancels.aimed_at(scope):
                cancel.end(scope)
            resume_points = await parts.history.resume_points(self.attempt)
            if self._counted:
                await parts.beginnings.count(self.attempt, self._begun)
                if self._delivery.stale:
                    scope.end(LeaseLost("another worker may have taken the job over"))
            outcome = await parts.runner.run(
                self.envelope,
                scope,
                permit=self._permit,
                resume_points=resume_points,
                lost=lambda: self._delivery.stale,
            )
        finally:
            forget()
        if self._counted:
            await self._uncount(outcome)
        await self._settle(result, outcome)

    async def _try_last(self, result: FinalResult) -> None:
        """A last attempt at a job whose workers died: nothing else is in quarantine meanwhile."""
        quarantine, before = self._parts.quarantine, self._parts.settings.policy.attempts - 1
        if self._begun >= before + LAST_ATTEMPTS:
            await self._give_up(result, "its workers ended without an answer, the last ones alone with it")
        elif not quarantine.occupied:
            with quarantine.entered():
                await self._try(result)
        elif await self._ends_before_the_engine():
            await self._try(result)
        else:
            await self._delivery.nak(DEFERRED)
            self.settled("deferred")

    async def _uncount(self, outcome: AttemptOutcome) -> None:
        """An attempt that was ended for no fault of the job does not count."""
        if self._delivery.stale or isinstance(outcome.error, LeaseLost):
            self._parts.beginnings.uncount_later(self.attempt, self._begun)
        elif isinstance(outcome.error, Draining | Misdirected):
            await self._parts.beginnings.uncount(self.attempt, self._begun)

    async def _ends_before_the_engine(self) -> bool:
        """Whether an attempt would be refused, late or cancelled."""
        try:
            attempt, _ = await self.envelope.open()
        except CallerError:
            return True
        return self._parts.runner.expired(attempt) or await self._parts.cancels.aimed_at(self._scope())

    async def _answered_before(self, result: FinalResult) -> Stored | None:
        """The result of the submission that this one repeats."""
        if result.first:
            return None
        return await self._parts.results.of_repeated(self.attempt, self._delivery.message)

    async def _answer_again(self, result: FinalResult, earlier: Stored) -> None:
        """What was answered is the answer to a repeated submission too, under its own number."""
        fields = without_nats(earlier.headers) | {headers.SUBMISSION: str(self.attempt.submission)}
        if await result.store(earlier.data, fields):
            await self._tell_readers(earlier)
        await self._delivery.ack()
        self.settled("repeated", reason="it had ended under an earlier number")

    async def _tell_readers(self, result: Stored | None) -> None:
        """Sends the stored result of another attempt, whose worker may not have done so."""
        if result is None or self._delivery.stale:
            return
        attempt = self.attempt
        with contextlib.suppress(CallerError):
            attempt, _ = await self.envelope.open()  # Its headers may name another reply subject.
        found = result.headers
        attempt = msgspec.structs.replace(attempt, number=number(found[headers.ATTEMPT]))
        served = Served(worker=found[headers.WORKER], prefill=found.get(headers.PREFILL_WORKER))
        reply = Reply(self._parts.broker, attempt, served)
        apart = parse_object(found)
        if apart is None:
            reply.whole(result.data, {name: found[name] for name in (headers.USAGE,) if name in found})
        reply.end(cast(headers.Status, found[headers.STATUS]), apart)
        await self._parts.broker.flush()

    async def _give_up(self, result: FinalResult, reason: str) -> None:
        """A job that is not tried again."""
        error = AttemptsExhausted(reason)
        await self._bury(result, self._parts.runner.failed(self.attempt, error), error)

    async def _bury(self, result: FinalResult, outcome: AttemptOutcome, error: InferbusError) -> None:
        """The dead letter comes first, so that nothing is lost if a later step fails."""
        await self._parts.dead_letters.store(outcome.attempt, self._delivery.message, error)
        await self._conclude(result, outcome)
        await self._forget_attempts()
        await self._delivery.term(error.code)
        self.settled("dead", error, code=error.code, reason=error.message)

    async def _conclude(self, result: FinalResult, outcome: AttemptOutcome) -> AttemptOutcome:
        """Stores the one result, then ends the reply; a second owner's result is dropped.

        An owner that was out of touch for too long may still store the first result, and it counts; but it
        sends no more to readers, who may be listening to its successor. That one tells them of it.
        """
        with tracing.span("publish", parent=outcome.span):
            try:
                ours = await self._store(result, outcome)
            except PayloadTooLarge as problem:
                outcome = await self._apart(outcome, problem)
                ours = await self._store(result, outcome)
            if not ours:
                log.warning("job.superseded", **facts(outcome.attempt))
                await self._tell_readers(result.own)
            elif not self._delivery.stale:
                outcome.answer()
                await self._parts.broker.flush()
        return outcome

    async def _store(self, result: FinalResult, outcome: AttemptOutcome) -> bool:
        served = served_headers(outcome.attempt, outcome.reply.served)
        fields = {headers.STATUS: outcome.status, **served, **origin(self._delivery.message)}
        if not outcome.usage:
            fields[headers.USAGE] = "unasked"
        body = outcome.body if outcome.apart is None else b""
        return await result.store(body, fields | object_header(outcome.apart))

    async def _apart(self, outcome: AttemptOutcome, problem: PayloadTooLarge) -> AttemptOutcome:
        """An outcome whose body is stored as an object, since a message cannot hold it."""
        objects, owner = self._parts.objects, outcome.attempt.owner
        if objects is not None:
            try:
                apart = await self._parts.storage.store(
                    lambda: objects.store(owner, outcome.body), subject="objects"
                )
            except PayloadTooLarge as larger:
                problem = larger
            else:
                return msgspec.structs.replace(outcome, apart=apart)
        # Another attempt would not make it smaller.
        error = PayloadTooLarge(f"the answer as a whole cannot be stored: {problem.message}")
        return msgspec.structs.replace(outcome, error=error, body=error_body(outcome.attempt, error))

    async def _fetch_body(self) -> None:
        """Fetches a body that is stored apart from its job; what is wrong with it is the answer."""
        objects = self._parts.objects
        try:
            self._body_apart = parse_object(self._delivery.message.headers)
            if self._body_apart is None:
                return
            if objects is None:
                raise NotSupported("this worker takes no bodies that are stored apart from their job")
            body = await objects.fetch(self.attempt.owner, self._body_apart)
            self.envelope = msgspec.structs.replace(self.envelope, body=body)
        except CallerError as error:
            self.envelope = msgspec.structs.replace(self.envelope, problem=error)

    async def _remove_body(self) -> None:
        """Removes a body that is stored apart; what cannot be removed expires."""
        if self._body_apart is None or self._parts.objects is None:
            return
        try:
            await self._parts.objects.remove(self.attempt.owner, self._body_apart)
        except BusUnavailable as error:
            log.warning("job.body_left", reason=error.message, **facts(self.attempt))

    async def _forget_attempts(self) -> None:
        """Of a job that has ended the count is of no use.

        Raises:
            BusUnavailable: It may not be removed: the job comes again, and is found to have ended.
        """
        if self._counted or self._begun:
            await self._parts.beginnings.forget(self.attempt)

    def _scope(self) -> Scope:
        attempt = self.attempt
        return Scope(attempt.key, submission=attempt.submission, stored=attempt.arrived)

    def settled(self, settlement: Settlement, error: InferbusError | None = None, **more: object) -> None:
        """Logs the end of the delivery, and reports it to the observer."""
        level, event = EVENTS[settlement]
        log.log(level, event, **more, **facts(self.attempt))
        self._parts.observer.settled(self.attempt, settlement, error)


async def _nothing_begun() -> Begun:
    """Of a job's first delivery: nothing was counted."""
    return Begun()
