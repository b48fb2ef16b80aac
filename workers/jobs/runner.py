"""Runs one attempt, from the envelope to its outcome; `delivery` decides what then becomes of a job."""

from __future__ import annotations

import contextlib
import datetime as dt
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import msgspec
import structlog

from inferbus.schemas.errors import InferbusError, InternalError
from inferbus.schemas.kinds import WireRequest
from inferbus.schemas.requests import ChatRequest, CompletionRequest
from inferbus.schemas.subjects import LIVE_OWNER
from inferbus.workers import tracing
from inferbus.workers.admission import Permit
from inferbus.workers.bus.interface import Broker
from inferbus.workers.jobs.attempt import Attempt, Envelope, facts
from inferbus.workers.jobs.history import ResumePoint
from inferbus.workers.jobs.listeners import Listeners
from inferbus.workers.jobs.observer import Observer
from inferbus.workers.jobs.outcome import AttemptOutcome
from inferbus.workers.jobs.reply import Reply, Served, error_body
from inferbus.workers.jobs.retained import RetainedAnswer, RetainedAnswers
from inferbus.workers.jobs.scope import Scope, Scopes
from inferbus.workers.jobs.settings import JobSettings
from inferbus.workers.observe import defects

log = structlog.get_logger()


class Work(msgspec.Struct, frozen=True, kw_only=True):
    """What an attempt has to do.

    Attributes:
        attempt: Which one.
        request: Checked as far as that goes without a model.
        reply: Where chunks go.
        permit: To be entered before the engine is asked.
        resume_points: Where an earlier attempt at a job can be resumed, the latest place first.
    """

    attempt: Attempt
    request: WireRequest
    reply: Reply
    permit: Permit = msgspec.field(default_factory=Permit)
    resume_points: Sequence[ResumePoint] = ()


Generate = Callable[[Work], Awaitable[bytes]]
"""Answers one request: streams its chunks to the reply if wanted, and returns the whole answer.

Raises `InferbusError`.
"""


class AttemptRunner:
    """Runs the attempts of one worker.

    Args:
        broker: Where replies go.
        generate: What the role does.
        settings: Of the worker.
        listeners: End attempts whose caller is gone.
        observer: Told of every outcome.
        retained: Keeps what is sent of live answers.
        now: The clock by which requests arrive and expire: the server's; aware.

    Attributes:
        scopes: The attempts under way.
        listeners: See above.
        retained: See above.
    """

    def __init__(
        self,
        broker: Broker,
        generate: Generate,
        settings: JobSettings,
        *,
        listeners: Listeners | None = None,
        observer: Observer | None = None,
        retained: RetainedAnswers | None = None,
        now: Callable[[], dt.datetime] = lambda: dt.datetime.now(dt.UTC),
    ) -> None:
        self.scopes = Scopes()
        self._broker = broker
        self._generate = generate
        self._settings = settings
        self.listeners = listeners or Listeners()
        self.retained = RetainedAnswers(broker) if retained is None else retained
        self._observer = observer or Observer()
        self._now = now

    @property
    def max_payload(self) -> int:
        """Largest message in bytes, headers included."""
        return self._broker.max_payload

    async def run(
        self,
        envelope: Envelope,
        scope: Scope,
        *,
        permit: Permit | None = None,
        resume_points: Sequence[ResumePoint] = (),
        lost: Callable[[], bool] = lambda: False,
        retained: RetainedAnswer | None = None,
    ) -> AttemptOutcome:
        """One attempt; never raises `InferbusError`, since every failure is an outcome.

        Args:
            envelope: The request.
            scope: Ends it from outside.
            permit: Has it run when its turn comes; at once without one.
            resume_points: Where an earlier attempt can be resumed.
            lost: Whether the job may belong to another worker by now; nothing is sent then.
            retained: Keeps what is sent of a live answer; its caller may then be away for a while.
        """
        queued = max(0.0, (self._now() - envelope.attempt.arrived).total_seconds())
        with _span(envelope, queued) as span:
            return await self._run(
                envelope, scope, permit or Permit(), resume_points, lost, retained, queued, span
            )

    async def _run(
        self,
        envelope: Envelope,
        scope: Scope,
        permit: Permit,
        resume_points: Sequence[ResumePoint],
        lost: Callable[[], bool],
        retained: RetainedAnswer | None,
        queued: float,
        span: tracing.Span,
    ) -> AttemptOutcome:
        attempt, streamed, usage = envelope.attempt, False, True
        started = time.monotonic()
        if attempt.durable:
            tracing.past("queue", queued)
        reply = self._reply(attempt, retained=retained)
        log.info("job.started", **facts(attempt))
        try:
            attempt, request = await envelope.open()
            streamed = attempt.streams(request)
            usage = not streamed or _asks_usage(request)
            probe = "" if attempt.durable else self.listeners.probe
            reply = self._reply(
                attempt, probe=probe, probe_every=self.listeners.every, lost=lost, retained=retained
            )
            work = Work(
                attempt=attempt, request=request, reply=reply, permit=permit, resume_points=resume_points
            )
            with self._expecting_listener(attempt, scope, may_be_away=retained is not None):
                body = await scope.run(self._generate(work), deadline=self._seconds_left(attempt))
            error = None
        except InferbusError as problem:
            error = problem
        except Exception:  # a supervision point: a defect must not take the worker down
            defects.exception("job.defect", **facts(attempt))
            error = InternalError("inferbus failed; the worker's log says how")
        if error is not None:
            body = error_body(attempt, error)
        outcome = AttemptOutcome(
            attempt=attempt,
            reply=reply,
            body=body,
            error=error,
            streamed=streamed,
            usage=usage,
            chunks=reply.sent,
            first_chunk=None if reply.begun is None else reply.begun - started,
            queued=queued,
            admitted_after=permit.waited,
            span=span,
        )
        seconds = time.monotonic() - started
        if tracing.active():
            span.set(_measured(outcome, seconds))
            if error is not None:
                span.failed(error.code)
        self._observer.attempt_ended(outcome, seconds)
        return outcome

    def failed(self, attempt: Attempt, error: InferbusError) -> AttemptOutcome:
        """The outcome of an attempt that is not made."""
        reply, body = self._reply(attempt), error_body(attempt, error)
        return AttemptOutcome(attempt=attempt, reply=reply, body=body, error=error, streamed=False)

    def refuse(self, envelope: Envelope, error: InferbusError) -> None:
        """Answers a live request that is not taken."""
        self.failed(envelope.attempt, error).answer()
        self._observer.refused(envelope.attempt, error)

    def expired(self, attempt: Attempt) -> bool:
        """Whether the deadline of an attempt whose headers were read has passed."""
        left = self._seconds_left(attempt)
        return left is not None and left <= 0

    def _reply(self, attempt: Attempt, **options: Any) -> Reply:
        return Reply(self._broker, attempt, Served(worker=self._settings.worker), **options)

    def _expecting_listener(
        self, attempt: Attempt, scope: Scope, *, may_be_away: bool
    ) -> contextlib.AbstractContextManager[None]:
        """Readers of a durable job may come and go."""
        if attempt.durable:
            return contextlib.nullcontext()
        return self.listeners.expected(attempt.reply, scope, may_be_away=may_be_away)

    def _seconds_left(self, attempt: Attempt) -> float | None:
        if attempt.deadline is not None:
            return (attempt.deadline - self._now()).total_seconds()
        if self._settings.patience is None:
            return None
        return self._settings.patience - (self._now() - attempt.arrived).total_seconds()


def _asks_usage(request: WireRequest) -> bool:
    """Whether the chunks of an answer are to report the usage; those of the kind `tokens` always do."""
    if isinstance(request, ChatRequest | CompletionRequest):
        return bool(request.stream_options and request.stream_options.include_usage)
    return True


def _span(envelope: Envelope, queued: float) -> tracing.Span:
    """Of an attempt. The caller of a live request waits for it, the submitter of a job does not."""
    if not tracing.active():
        return tracing.OFF
    attempt, found = envelope.attempt, envelope.headers
    return tracing.span(
        f"{attempt.kind} {attempt.model}",
        kind="consumer" if attempt.durable else "server",
        parent=None if attempt.durable else found,
        links=found if attempt.durable else {},
        ago=queued,
        attributes={
            "gen_ai.operation.name": attempt.kind,
            "gen_ai.request.model": attempt.model,
            "inferbus.job": attempt.job,
            "inferbus.owner": attempt.owner,
            "inferbus.attempt": attempt.number,
            "inferbus.class": attempt.job_class or LIVE_OWNER,
        },
    )


def _measured(outcome: AttemptOutcome, seconds: float) -> dict[str, str | int | float]:
    """Attributes of an attempt that has ended, by the names that SGLang's own spans have."""
    waited = outcome.queued + outcome.admitted_after
    found: dict[str, str | int | float] = {
        "inferbus.status": outcome.status,
        "inferbus.chunks": outcome.chunks,
        "gen_ai.latency.time_in_queue": waited,
        "gen_ai.latency.e2e": outcome.queued + seconds,
    }
    if outcome.first_chunk is not None:
        found["gen_ai.latency.time_to_first_token"] = outcome.queued + outcome.first_chunk
    return found
