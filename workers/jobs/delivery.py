"""The delivery contract of durable jobs: `HeldJob` is its table, before an attempt and after it.

    taken      → result there already?      acknowledge, nothing else
               → taken over meanwhile?      leave it to its new owner
               → a repeated submission?     the result that it has already, again
               → workers died of it?        last attempts are made alone; after those, dead letter
               → cancelled while queued?    cancelled, without touching the engine
    succeeded  → result stored once → end mark → acknowledged
    caller's fault, cancelled, expired → the same, with the error as the result
    taken over → leave it to its new owner
    draining   → handed back at once
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
    LeaseLost,
    PayloadTooLarge,
)
from inferbus.workers.admission import Permit
from inferbus.workers.bus.interface import Broker, Delivery, Stored
from inferbus.workers.jobs import cancel
from inferbus.workers.jobs.attempt import Attempt, Envelope, durable, facts
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

log = structlog.get_logger()

DEFERRED: Final = 5.0
"""Seconds after which a job that found the quarantine occupied comes again, here or elsewhere."""

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
        clock: Monotonic seconds.

    Attributes:
        results: Stored ones.
        dead_letters: Stores them.
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
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.broker = broker
        self.runner = runner
        self.cancels = cancels
        self.settings = settings
        self.observer = observer or Observer()
        self.results = ResultStore(broker, settings, clock)
        self.dead_letters = DeadLetters(broker, settings, clock)
        self.quarantine = Quarantine(broker, settings, clock)
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
                self.runner, self.cancels, self.results, self.settings, delivery, job.envelope
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
            envelope = durable(
                message, number=delivery.attempt, subjects=settings.subjects, replies=settings.replies
            )
        except CallerError as error:
            log.error("job.unreadable", subject=message.subject, sequence=message.sequence, code=error.code)
            await delivery.term(error.code)
            return
        job = HeldJob(self, delivery, envelope, permit)
        try:
            await handle(job)
        except BusUnavailable as error:
            job.settled("left", error, reason=error.message)


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

    @property
    def attempt(self) -> Attempt:
        """The attempt that this delivery is about, as far as the headers need not be read for it."""
        return self.envelope.attempt

    async def handle(self) -> None:
        """The table, before an attempt.

        Raises:
            BusUnavailable: NATS is away, or was for too long.
        """
        policy = self._parts.settings.policy
        result, in_order = await self._look_up()
        if result.stored:
            await self._delivery.ack()
            self.settled("repeated", reason="its result is stored")
        elif self._delivery.stale:
            self.settled("left", reason="another worker may have taken it over")
        elif (earlier := await self._answered_before(result)) is not None:
            await self._answer_again(result, earlier)
        elif self.attempt.number == 1 or not policy.last(self.attempt.number):
            await self._try(result)
        elif policy.attempts == 1:
            await self._give_up(result, "it came once more after its only attempt")
        elif in_order:
            await self._try(result)
        else:
            await self._try_last(result)

    async def _settle(self, result: FinalResult, outcome: AttemptOutcome) -> None:
        """The table, after an attempt."""
        policy, error, attempt = self._parts.settings.policy, outcome.error, outcome.attempt
        if error is None or isinstance(error, CallerError | Ended):
            outcome = await self._conclude(result, outcome)
            await self._delivery.ack()
            self.settled("finished", outcome.error, status=outcome.status, code=outcome.code)
        elif self._delivery.stale or isinstance(error, LeaseLost):
            # Handing it back would take it from its new owner.
            self.settled("left", error, reason=error.message)
        elif isinstance(error, Draining):
            outcome.reply.retrying(error)
            await self._delivery.nak(0.0)
            self.settled("handed_back", error)
        elif policy.last(attempt.number):
            await self._bury(result, outcome, error)
        else:
            delay = policy.delay(attempt.number)
            outcome.reply.retrying(error)
            await self._delivery.nak(delay)
            self.settled("retried", error, code=error.code, reason=error.message, delay=delay)

    async def _look_up(self) -> tuple[FinalResult, bool]:
        """Where the result belongs, and whether the attempt before this one ended in order, if that is known.

        The attempt gets a number above all that readers have seen: a server that was killed may have
        forgotten deliveries.
        """
        result, latest = await asyncio.gather(
            self._parts.results.of(self.attempt), self._parts.history.latest(self.attempt)
        )
        following = latest.number + 1
        attempt = msgspec.structs.replace(self.attempt, number=max(self.attempt.number, following))
        self.envelope = msgspec.structs.replace(self.envelope, attempt=attempt)
        return result, latest.ended_in_order and attempt.number == following

    async def _try(self, result: FinalResult, *, begun: int | None = None) -> None:
        """One attempt; a last one where `begun` says how many of those began before it."""
        parts, scope = self._parts, self._scope()
        forget = parts.runner.scopes.add(scope)
        try:
            if await parts.cancels.aimed_at(scope):
                cancel.end(scope)
            resume_points = await parts.history.resume_points(self.attempt)
            if begun is not None:
                await parts.quarantine.count(self.attempt, begun)
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
        if begun is not None:
            await self._uncount(outcome, begun)
        await self._settle(result, outcome)

    async def _try_last(self, result: FinalResult) -> None:
        """A last attempt at a job whose workers died: nothing else is in quarantine meanwhile."""
        quarantine = self._parts.quarantine
        begun = await quarantine.begun(self.attempt)
        if begun >= LAST_ATTEMPTS:
            await self._give_up(result, "its workers ended without an answer, the last ones alone with it")
        elif not quarantine.occupied:
            with quarantine.entered():
                await self._try(result, begun=begun)
        elif await self._ends_before_the_engine():
            await self._try(result)
        else:
            await self._delivery.nak(DEFERRED)
            self.settled("deferred")

    async def _uncount(self, outcome: AttemptOutcome, begun: int) -> None:
        """A last attempt that was not the job's fault does not count."""
        if self._delivery.stale or isinstance(outcome.error, LeaseLost):
            self._parts.quarantine.uncount_later(self.attempt, begun)
        elif isinstance(outcome.error, Draining):
            await self._parts.quarantine.uncount(self.attempt, begun)

    async def _ends_before_the_engine(self) -> bool:
        """Whether an attempt would be refused, late or cancelled."""
        try:
            attempt, _ = self.envelope.open()
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
        attempt = self.attempt
        with contextlib.suppress(CallerError):
            attempt, _ = self.envelope.open()  # Its headers may name another reply subject.
        answered = without_nats(earlier.headers)
        attempt = msgspec.structs.replace(attempt, number=number(answered[headers.ATTEMPT]))
        fields = answered | {headers.SUBMISSION: str(attempt.submission)}
        if await result.store(earlier.data, fields) and not self._delivery.stale:
            served = Served(worker=answered[headers.WORKER], prefill=answered.get(headers.PREFILL_WORKER))
            reply = Reply(self._parts.broker, attempt, served)
            reply.whole(earlier.data)
            reply.end(cast(headers.Status, answered[headers.STATUS]))
            await self._parts.broker.flush()
        await self._delivery.ack()
        self.settled("repeated", reason="it had ended under an earlier number")

    async def _give_up(self, result: FinalResult, reason: str) -> None:
        """A job that is not tried again."""
        error = AttemptsExhausted(reason)
        await self._bury(result, self._parts.runner.failed(self.attempt, error), error)

    async def _bury(self, result: FinalResult, outcome: AttemptOutcome, error: InferbusError) -> None:
        """The dead letter comes first, so that nothing is lost if a later step fails."""
        await self._parts.dead_letters.store(outcome.attempt, self._delivery.message, error)
        await self._conclude(result, outcome)
        await self._delivery.term(error.code)
        self.settled("dead", error, code=error.code, reason=error.message)

    async def _conclude(self, result: FinalResult, outcome: AttemptOutcome) -> AttemptOutcome:
        """Stores the one result, then ends the reply; a second owner's result is dropped.

        An owner that was out of touch for too long may still store the first result, and it counts; but it
        sends no more to readers, who may be listening to its successor.
        """
        try:
            ours = await self._store(result, outcome)
        except PayloadTooLarge as problem:
            # Another attempt would not make it smaller.
            error = PayloadTooLarge(f"the answer as a whole cannot be stored: {problem.message}")
            body = error_body(outcome.attempt, error)
            outcome = msgspec.structs.replace(outcome, error=error, body=body)
            ours = await self._store(result, outcome)
        if not ours:
            log.warning("job.superseded", **facts(outcome.attempt))
        elif not self._delivery.stale:
            outcome.answer()
            await self._parts.broker.flush()
        return outcome

    async def _store(self, result: FinalResult, outcome: AttemptOutcome) -> bool:
        served = served_headers(outcome.attempt, outcome.reply.served)
        fields = {headers.STATUS: outcome.status, **served, **origin(self._delivery.message)}
        return await result.store(outcome.body, fields)

    def _scope(self) -> Scope:
        attempt = self.attempt
        return Scope(attempt.key, submission=attempt.submission, stored=attempt.arrived)

    def settled(self, settlement: Settlement, error: InferbusError | None = None, **more: object) -> None:
        """Logs the end of the delivery, and reports it to the observer."""
        level, event = EVENTS[settlement]
        log.log(level, event, **more, **facts(self.attempt))
        self._parts.observer.settled(self.attempt, settlement, error)
