"""The delivery contract of durable jobs, in the order of its table: before an attempt, and after it.

    taken      → result there already?      acknowledge, nothing else
               → handed in once more?       the result that it has already, again
               → workers died of it?        last attempts are made alone; after those, dead letter
               → cancelled while queued?    cancelled, without touching the engine
    succeeded  → result stored once → end mark → acknowledged
    caller's fault, cancelled, expired → the same, with the error as the result
    draining   → handed back at once
    failed     → tried again after a growing delay; after the last attempt: dead letter → result → terminated

The final result is stored before the job is acknowledged, and only if no
other owner has stored one since this attempt began; so a job ends in exactly
one result however often it was delivered.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Final, Literal, TypeVar, cast

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
from inferbus.schemas.subjects import Subjects
from inferbus.workers.bus.interface import Broker, Delivery, Stored
from inferbus.workers.bus.jetstream.layout import RESULTS
from inferbus.workers.bus.jetstream.layout import STREAM as CHUNKS
from inferbus.workers.jobs import cancel
from inferbus.workers.jobs.attempt import Attempts, Outcome, facts
from inferbus.workers.jobs.cancel import Cancels
from inferbus.workers.jobs.duplicate import origin, repeats
from inferbus.workers.jobs.history import ResumePoint, points
from inferbus.workers.jobs.job import Envelope, Job, durable
from inferbus.workers.jobs.quarantine import LAST_ATTEMPTS, LastAttempts, given_up
from inferbus.workers.jobs.reply import Reply, Served, error_body, served_headers
from inferbus.workers.jobs.retry import RetryPolicy
from inferbus.workers.jobs.scope import Scope

log = structlog.get_logger()

T = TypeVar("T")

Settled = Literal["finished", "retried", "handed_back", "deferred", "dead", "repeated", "left"]
"""What became of a delivery: answered, be it with the caller's error or `cancelled`; to be tried again; given
back by a worker that stops; given back until another job's last attempt is over; given up; answered already;
another worker's by now, or NATS is away."""

PATIENCE: Final = 300.0
"""Seconds for which a finished answer waits for NATS to come back."""

FIRST_PAUSE: Final = 0.1
LONGEST_PAUSE: Final = 5.0

DEFERRED: Final = 5.0
"""Seconds after which a job whose last attempt had to wait comes again, here or elsewhere."""

_WHOSE: Final = (headers.SUBMISSION, headers.ATTEMPT, headers.WORKER)
"""What tells one attempt's result from every other's."""


class Deliveries:
    """Keeps the contract for the deliveries of one worker.

    Args:
        broker: Where results, replies and dead letters go.
        attempts: Runs them.
        cancels: Knows which jobs their owners gave up.
        subjects: Of this bus.
        policy: How often and how soon a job is tried again.
        replies: Prefixes of reply subjects that callers may name.
        worker: This worker's id.
        window: Seconds within which a second submission under one message id is none.
        clock: Monotonic seconds.

    Attributes:
        settled: Called with what became of each delivery, and the error that it was about.
    """

    def __init__(
        self,
        broker: Broker,
        attempts: Attempts,
        cancels: Cancels,
        *,
        subjects: Subjects,
        policy: RetryPolicy,
        replies: tuple[str, ...],
        worker: str,
        window: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._broker = broker
        self._attempts = attempts
        self._last = LastAttempts(broker, subjects)
        self._cancels = cancels
        self._subjects = subjects
        self._policy = policy
        self._replies = replies
        self._worker = worker
        self._window = window
        self._clock = clock
        self.settled: Callable[[Job, Settled, InferbusError | None], None] = lambda job, outcome, error: None

    async def handle(self, delivery: Delivery) -> None:
        """Sees one delivery through to its acknowledgement, or gives it back.

        Where NATS is away the job is left alone: it will be delivered again, and the result that may be
        stored already is found then.
        """
        message = delivery.message
        try:
            envelope = durable(
                message, attempt=delivery.attempt, subjects=self._subjects, replies=self._replies
            )
        except CallerError as error:
            log.error("job.unreadable", subject=message.subject, sequence=message.sequence, code=error.code)
            await delivery.term(error.code)
            return
        try:
            await self._handle(delivery, envelope)
        except BusUnavailable as error:
            log.warning("job.left", reason=error.message, **facts(envelope.job))
            self.settled(envelope.job, "left", error)

    async def _handle(self, delivery: Delivery, envelope: Envelope) -> None:
        previous, (envelope, orderly) = await asyncio.gather(
            self._result(envelope.job), self._numbered(envelope)
        )
        job = envelope.job
        if previous is not None and _submission(previous) >= (job.submission or 0):
            await delivery.ack()
            log.info("job.acknowledged", reason="its result is stored", **facts(job))
            self.settled(job, "repeated", None)
            return
        if delivery.stale:
            # It waited for its turn while NATS was away, and was given to somebody else.
            log.warning("job.left", reason="another worker may have taken it over", **facts(job))
            self.settled(job, "left", None)
            return
        expect = 0 if previous is None else previous.sequence
        if previous is not None and (answer := await self._answered(job, delivery.message)) is not None:
            await self._restate(delivery, envelope, answer, expect)
            return
        if job.attempt == 1 or not self._policy.last(job.attempt):
            await self._attempt(delivery, envelope, expect)
        elif self._policy.attempts == 1:
            error = AttemptsExhausted("it came once more after its only attempt")
            await self._bury(delivery, self._failed(job, error), expect)
        elif orderly:
            await self._attempt(delivery, envelope, expect)
        else:
            await self._attempt_alone(delivery, envelope, expect)

    async def _attempt_alone(self, delivery: Delivery, envelope: Envelope, expect: int) -> None:
        """A last attempt at a job whose workers fell silent."""
        job = envelope.job
        begun = await self._last.begun(job)
        if begun >= LAST_ATTEMPTS:
            error = AttemptsExhausted("its workers ended without an answer, the last ones alone with it")
            await self._bury(delivery, self._failed(job, error), expect)
        elif not self._last.running:
            with self._last.alone():
                await self._attempt(delivery, envelope, expect, begun=begun)
        elif await self._over(envelope):
            await self._attempt(delivery, envelope, expect)
        else:
            await delivery.nak(DEFERRED)
            log.info("job.deferred", **facts(job))
            self.settled(job, "deferred", None)

    async def _over(self, envelope: Envelope) -> bool:
        """Whether an attempt would end before it comes to an engine."""
        try:
            job, _ = envelope.open()
        except CallerError:
            return True
        if self._attempts.expired(job):
            return True
        return await self._cancels.hit(Scope(job.key, submission=job.submission, stored=job.arrived))

    async def _attempt(
        self, delivery: Delivery, envelope: Envelope, expect: int, *, begun: int | None = None
    ) -> None:
        """One attempt; a last one where `begun` says how many of those there were before."""
        job = envelope.job
        scope = Scope(job.key, submission=job.submission, stored=job.arrived)
        forget = self._attempts.scopes.add(scope)
        try:
            if await self._cancels.hit(scope):
                cancel.end(scope)
            points = await self._points(job)
            if begun is not None:
                subject = self._subjects.attempts(job.owner, job.id)
                await self._patiently(subject, lambda: self._last.count(job, begun + 1))
                if delivery.stale:
                    scope.end(LeaseLost("another worker may have taken the job over"))
            outcome = await self._attempts.run(envelope, scope, points=points, lost=lambda: delivery.stale)
        finally:
            forget()
        if begun is not None and (delivery.stale or isinstance(outcome.error, LeaseLost)):
            self._last.take_back(job, begun)
        elif begun is not None and isinstance(outcome.error, Draining):
            await self._last.count(job, begun)
        await self._settle(delivery, outcome, expect)

    async def _answered(self, job: Job, message: Stored) -> Stored | None:
        """The result of the submission that this one repeats; see `duplicate`."""
        results = await self._broker.read(RESULTS, self._subjects.result(job.owner, job.id))
        window = self._window
        return next((each for each in reversed(results) if repeats(message, each, window=window)), None)

    async def _restate(self, delivery: Delivery, envelope: Envelope, answer: Stored, expect: int) -> None:
        """What was answered is the answer to a repeated submission too, under its own number."""
        job = envelope.job
        with contextlib.suppress(CallerError):
            job, _ = envelope.open()  # It may name where its answer goes.
        told = {name: text for name, text in answer.headers.items() if not name.startswith("Nats-")}
        found = told | {headers.SUBMISSION: str(job.submission)}
        job = msgspec.structs.replace(job, attempt=headers.number(told, headers.ATTEMPT) or 0)
        subject = self._subjects.result(job.owner, job.id)
        store = functools.partial(self._store_once, job, answer.data, found, expect)
        if await self._patiently(subject, store) and not delivery.stale:
            prefill = told.get(headers.PREFILL_WORKER)
            reply = Reply(self._broker, job, Served(worker=told[headers.WORKER], prefill=prefill))
            reply.whole(answer.data)
            reply.end(cast(headers.Status, told[headers.STATUS]))
            await self._broker.flush()
        await delivery.ack()
        log.warning("job.acknowledged", reason="it had ended under an earlier number", **facts(job))
        self.settled(job, "repeated", None)

    async def _numbered(self, envelope: Envelope) -> tuple[Envelope, bool]:
        """The attempt's number is above all that readers have seen: a server that was killed counts anew.

        Returns:
            And whether the attempt before it was given up in good order, as far as that is known: what its
            worker says last of an answer that goes to an inbox is nowhere stored.
        """
        job = envelope.job
        newest = await self._broker.last(CHUNKS, job.reply)
        if newest is None or newest.headers.get(headers.SUBMISSION) != str(job.submission):
            return envelope, False
        seen = headers.number(newest.headers, headers.ATTEMPT) or 0
        job = msgspec.structs.replace(job, attempt=max(job.attempt, seen + 1))
        over = job.attempt == seen + 1 and given_up(newest)
        return msgspec.structs.replace(envelope, job=job), over

    async def _points(self, job: Job) -> list[ResumePoint]:
        """Where an earlier attempt can be gone on from. Chunks that went to an inbox are nowhere stored."""
        if job.attempt == 1 or job.submission is None:
            return []
        stored = await self._broker.read(CHUNKS, self._subjects.stream(job.owner, job.id))
        return points(stored, submission=job.submission, before=job.attempt)

    async def _settle(self, delivery: Delivery, outcome: Outcome, expect: int) -> None:
        error, job = outcome.error, outcome.job
        if error is None or isinstance(error, CallerError | Ended):
            await self._conclude(delivery, outcome, expect)
            await delivery.ack()
            code = outcome.error and outcome.error.code
            log.info("job.finished", status=outcome.status, code=code, **facts(job))
            self.settled(job, "finished", outcome.error)
        elif delivery.stale or isinstance(error, LeaseLost):
            # Asking for it back would take it from its new owner.
            log.warning("job.left", reason=error.message, **facts(job))
            self.settled(job, "left", error)
        elif isinstance(error, Draining):
            outcome.reply.retrying(error)
            await delivery.nak(0.0)
            log.info("job.handed_back", **facts(job))
            self.settled(job, "handed_back", error)
        elif self._policy.last(job.attempt):
            await self._bury(delivery, outcome, expect)
        else:
            delay = self._policy.delay(job.attempt)
            outcome.reply.retrying(error)
            await delivery.nak(delay)
            log.warning("job.retried", code=error.code, reason=error.message, delay=delay, **facts(job))
            self.settled(job, "retried", error)

    async def _bury(self, delivery: Delivery, outcome: Outcome, expect: int) -> None:
        """A dead letter first, so that whatever fails after it loses nothing."""
        job, message = outcome.job, delivery.message
        code = outcome.error.code if outcome.error else ""
        reason = outcome.error.message if outcome.error else ""
        # The server's own headers were about the submission, and would be about the letter now.
        kept = {name: text for name, text in message.headers.items() if not name.startswith("Nats-")}
        letter = {
            **kept,
            headers.REASON: code,
            headers.DETAIL: reason,
            headers.ATTEMPT: str(job.attempt),
            headers.JOB_ID: job.id,
            headers.SUBJECT: message.subject,
            headers.SUBMISSION: str(message.sequence),
            headers.WORKER: self._worker,
            headers.MSG_ID: f"dead-{message.sequence}",
        }
        subject = self._subjects.dead(job.model, job.kind)
        try:
            await self._patiently(subject, lambda: self._broker.store(subject, message.data, letter))
        except PayloadTooLarge as error:
            # The job just fitted; with a letter's own headers it does not. Its error is its result.
            log.error("job.no_letter", reason=error.message, **facts(job))
        await self._conclude(delivery, outcome, expect)
        await delivery.term(code)
        log.error("job.dead", code=code, reason=reason, **facts(job))
        self.settled(job, "dead", outcome.error)

    async def _conclude(self, delivery: Delivery, outcome: Outcome, expect: int) -> None:
        """Stores the one result, then ends the reply; a second owner's result is dropped.

        An owner that was out of touch for too long may still have the first result, and it counts; but it
        says nothing more to readers, who may be listening to its successor.
        """
        try:
            ours = await self._store_result(delivery, outcome, expect)
        except PayloadTooLarge as error:
            # Another attempt would not make it smaller.
            outcome.error = PayloadTooLarge(f"the answer as a whole cannot be stored: {error.message}")
            outcome.body = error_body(outcome.job, outcome.error)
            ours = await self._store_result(delivery, outcome, expect)
        if not ours:
            log.warning("job.superseded", **facts(outcome.job))
        elif not delivery.stale:
            outcome.answer()
            await self._broker.flush()

    async def _store_result(self, delivery: Delivery, outcome: Outcome, expect: int) -> bool:
        job = outcome.job
        served = served_headers(job, outcome.served)
        found = {headers.STATUS: outcome.status, **served, **origin(delivery.message)}
        subject = self._subjects.result(job.owner, job.id)
        return await self._patiently(subject, lambda: self._store_once(job, outcome.body, found, expect))

    async def _store_once(self, job: Job, body: bytes, found: Mapping[str, str], expect: int) -> bool:
        """Stores a result unless this submission or a later one has one; whether the one there is this one.

        What came in between may be the result of an earlier submission with the same id, which must not
        keep this one from having its own; or this very result, whose confirmation was lost.
        """
        subject = self._subjects.result(job.owner, job.id)
        while await self._broker.store(subject, body, found, expect=expect) is None:
            newest = await self._result(job)
            if newest is not None and _submission(newest) >= (job.submission or 0):
                return all(newest.headers.get(name) == found[name] for name in _WHOSE)
            before, expect = expect, 0 if newest is None else newest.sequence
            if expect == before:
                raise BusUnavailable("the newest result cannot be seen yet")
        return True

    async def _patiently(self, subject: str, store: Callable[[], Awaitable[T]]) -> T:
        """Stores, and while NATS is away goes on trying: a finished answer is not thrown away for that.

        Raises:
            BusUnavailable: Not within `PATIENCE`.
        """
        deadline = self._clock() + PATIENCE
        pause = FIRST_PAUSE
        while True:
            try:
                return await store()
            except BusUnavailable as error:
                if self._clock() + pause > deadline:
                    raise
                log.warning("result.waiting", subject=subject, reason=error.message)
                await asyncio.sleep(pause)
                pause = min(pause * 2, LONGEST_PAUSE)

    async def _result(self, job: Job) -> Stored | None:
        return await self._broker.last(RESULTS, self._subjects.result(job.owner, job.id))

    def _failed(self, job: Job, error: InferbusError) -> Outcome:
        served = Served(worker=self._worker)
        return Outcome(
            job=job,
            reply=Reply(self._broker, job, served),
            served=served,
            body=error_body(job, error),
            error=error,
            streamed=False,
        )


def _submission(result: Stored) -> int:
    """The submission that a stored result answers."""
    return headers.number(result.headers, headers.SUBMISSION) or 0
