"""One attempt, from the envelope to an outcome; what then becomes of the message is `delivery`'s."""

from __future__ import annotations

import datetime as dt
import time
from collections.abc import Awaitable, Callable

import msgspec
import structlog

from inferbus.schemas import headers
from inferbus.schemas.errors import Cancelled, DeadlineExceeded, InferbusError, InternalError
from inferbus.schemas.requests import AnyRequest
from inferbus.workers.bus.interface import Broker
from inferbus.workers.jobs.history import ResumePoint
from inferbus.workers.jobs.job import Envelope, Job
from inferbus.workers.jobs.reply import Reply, Served, error_body
from inferbus.workers.jobs.scope import Scope, Scopes

log = structlog.get_logger()


class Work(msgspec.Struct, frozen=True, kw_only=True):
    """What an attempt has to do.

    Attributes:
        job: The attempt.
        request: Checked as far as that goes without a model.
        reply: Where chunks go.
        served: Filled in by whoever does the work.
        points: Where an earlier attempt at a job can be gone on from, the latest place first.
    """

    job: Job
    request: AnyRequest
    reply: Reply
    served: Served
    points: list[ResumePoint] = []


Generate = Callable[[Work], Awaitable[bytes]]
"""Answers one request: streams its chunks to the reply if wanted, and returns the whole answer.

Raises `InferbusError`.
"""


class Outcome(msgspec.Struct, kw_only=True):
    """How an attempt went.

    Attributes:
        job: The attempt.
        reply: Where its chunks went.
        served: Who answered.
        body: The whole answer, or the error as an answer.
        error: None on success.
        streamed: Whether the answer has gone out in chunks already.
        chunks: How many have gone out.
        first_chunk: Seconds from the attempt's beginning to the first one; None where none has gone out.
    """

    job: Job
    reply: Reply
    served: Served
    body: bytes
    error: InferbusError | None
    streamed: bool
    chunks: int = 0
    first_chunk: float | None = None

    @property
    def status(self) -> headers.Status:
        """As the end mark says it."""
        if self.error is None:
            return "ok"
        if isinstance(self.error, Cancelled):
            return "cancelled"
        return "expired" if isinstance(self.error, DeadlineExceeded) else "error"

    def answer(self) -> None:
        """Sends what is still to be sent, and the end mark."""
        if self.error is not None or not self.streamed:
            self.reply.whole(self.body)
        self.reply.end(self.status)


class Attempts:
    """Runs the attempts of one worker.

    Args:
        broker: Where replies go.
        generate: What the role does.
        worker: This worker's id.
        probe_every: See `Reply`; `probe` is set once there is such a subject.
        patience: Seconds from its arrival in which a request that names no deadline must be answered.
        now: Wall clock, aware.

    Attributes:
        scopes: The attempts under way.
        probe: Reply subject for finding out that nobody listens.
        ended: Called with every outcome and the seconds it took.
    """

    def __init__(
        self,
        broker: Broker,
        generate: Generate,
        *,
        worker: str,
        probe_every: int = 16,
        patience: float | None = None,
        now: Callable[[], dt.datetime] = lambda: dt.datetime.now(dt.UTC),
    ) -> None:
        self.scopes = Scopes()
        self._broker = broker
        self._generate = generate
        self._worker = worker
        self.probe = ""
        self._probe_every = probe_every
        self._patience = patience
        self._now = now
        self.ended: Callable[[Outcome, float], None] = lambda outcome, seconds: None
        self._listeners: dict[str, Scope] = {}

    def gone(self, reply: str) -> None:
        """The server says that nobody listens on a reply subject: its attempt is of no use any more."""
        scope = self._listeners.get(reply)
        if scope is not None:
            scope.end(Cancelled("nobody listens on the reply subject any more"))

    async def run(
        self,
        envelope: Envelope,
        scope: Scope,
        *,
        points: list[ResumePoint] | None = None,
        lost: Callable[[], bool] = lambda: False,
    ) -> Outcome:
        """One attempt; never raises `InferbusError`, since every failure is an outcome.

        Args:
            envelope: What to do.
            scope: Ends it from outside.
            points: Where an earlier attempt can be gone on from.
            lost: Whether the job may be somebody else's by now; nothing is sent then.
        """
        job, served, streamed = envelope.job, Served(worker=self._worker), False
        started = time.monotonic()
        reply = Reply(self._broker, job, served)
        log.info("job.started", **facts(job))
        try:
            job, request = envelope.open()
            streamed = job.streams(request)
            reply = self._reply(job, served, lost)
            self._listeners[job.reply] = scope
            work = Work(job=job, request=request, reply=reply, served=served, points=points or [])
            body = await scope.run(self._generate(work), deadline=self._seconds_left(job))
            error = None
        except InferbusError as problem:
            error = problem
        except Exception:  # a supervision point: a defect must not take the worker down
            log.exception("job.defect", **facts(job))
            error = InternalError("inferbus failed; the worker's log says how")
        finally:
            self._listeners.pop(job.reply, None)
        if error is not None:
            body = error_body(job, error)
        outcome = Outcome(
            job=job,
            reply=reply,
            served=served,
            body=body,
            error=error,
            streamed=streamed,
            chunks=reply.sent,
            first_chunk=None if reply.begun is None else reply.begun - started,
        )
        self.ended(outcome, time.monotonic() - started)
        return outcome

    def _reply(self, job: Job, served: Served, lost: Callable[[], bool]) -> Reply:
        probe = "" if job.durable else self.probe
        return Reply(self._broker, job, served, probe=probe, probe_every=self._probe_every, lost=lost)

    def expired(self, job: Job) -> bool:
        """Whether a job's deadline has passed; its headers were read."""
        left = self._seconds_left(job)
        return left is not None and left <= 0

    def _seconds_left(self, job: Job) -> float | None:
        if job.deadline is not None:
            return (job.deadline - self._now()).total_seconds()
        if self._patience is None:
            return None
        return self._patience - (self._now() - job.arrived).total_seconds()


def facts(job: Job) -> dict[str, object]:
    """What a log event says of an attempt."""
    return {
        "job": job.id,
        "owner": job.owner,
        "kind": job.kind,
        "attempt": job.attempt,
        "submission": job.submission,
    }
