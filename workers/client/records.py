"""What an operator sees: dead letters, queued jobs, queues. None of them holds request content."""

from __future__ import annotations

import datetime as dt
from collections.abc import Mapping
from typing import Any, Final

import msgspec

from inferbus.schemas import headers
from inferbus.schemas.errors import InvalidSubject
from inferbus.schemas.headers import Status
from inferbus.schemas.subjects import AnyKind, JobAddress, JobClass, Subjects, escape, unescape
from inferbus.workers.bus.interface import Stored
from inferbus.workers.bus.jetstream.client import parse_time

NO_END: Final = dt.timedelta(days=3650)
"""The length of a pause without an end: the server requires a moment."""


class DeadLetter(msgspec.Struct, frozen=True, kw_only=True):
    """A dead letter, without the body of its job.

    Attributes:
        letter: Its sequence, which names it.
        died: When it was written.
        age: Seconds since then.
        model: Of the job.
        kind: Of the job.
        owner: Of the job; None, as for all of these, where the letter does not say.
        job: The job's id.
        job_class: Of the job.
        code: The last error's.
        reason: The last error's message.
        attempts: How many there were.
        worker: The worker of the last attempt.
        submission: The job's sequence in the queue.
        deadline: Of the job, as in its header.
        subject: Of the job, also when it is replayed.
        size: Of the job's body.
    """

    letter: int
    died: dt.datetime
    age: float
    model: str | None
    kind: str | None
    owner: str | None
    job: str | None
    job_class: JobClass | None
    code: str | None
    reason: str | None
    attempts: int | None
    worker: str | None
    submission: int | None
    deadline: str | None
    subject: str | None
    size: int

    @classmethod
    def of(cls, stored: Stored, subjects: Subjects, now: dt.datetime) -> DeadLetter:
        """A dead letter as stored. Its content is not trusted: other programs may have written it."""
        message_headers = stored.headers
        address = job_address(message_headers.get(headers.SUBJECT, ""), subjects)
        model, kind = _last_tokens(stored.subject)
        return cls(
            letter=stored.sequence,
            died=stored.time,
            age=(now - stored.time).total_seconds(),
            model=address.model if address else model,
            kind=address.kind if address else kind,
            owner=address.owner if address else None,
            job=message_headers.get(headers.JOB_ID),
            job_class=address.job_class if address else None,
            code=message_headers.get(headers.REASON),
            reason=message_headers.get(headers.DETAIL),
            attempts=headers.number(message_headers, headers.ATTEMPT),
            worker=message_headers.get(headers.WORKER),
            submission=headers.number(message_headers, headers.SUBMISSION),
            deadline=message_headers.get(headers.DEADLINE),
            subject=message_headers.get(headers.SUBJECT),
            size=len(stored.data),
        )


class QueuedJob(msgspec.Struct, frozen=True, kw_only=True):
    """A job that has not ended.

    Attributes:
        submission: Its sequence in the queue.
        job: Its id.
        owner: Who submitted it.
        model: For this model.
        job_class: In this class.
        kind: Of this kind.
        submitted: When the server stored it.
        age: Seconds since then.
        size: Of its body.
        taken: Whether it was delivered to a worker: it runs, or waits for its next attempt.
    """

    submission: int
    job: str
    owner: str
    model: str
    job_class: JobClass
    kind: AnyKind
    submitted: dt.datetime
    age: float
    size: int
    taken: bool


class Queue(msgspec.Struct, frozen=True, kw_only=True):
    """The consumer that delivers a model's jobs of one class.

    Attributes:
        model: For this model.
        job_class: Of this class.
        consumer: Its name.
        pending: Jobs that were not delivered yet.
        ack_pending: Jobs that run, or wait for their next attempt.
        redelivered: Of those, how many were delivered more than once.
        waiting: Open pull requests of workers.
        delivered: The newest submission that was delivered.
        paused_until: Nothing is delivered until then; None: not paused.
    """

    model: str
    job_class: JobClass
    consumer: str
    pending: int
    ack_pending: int
    redelivered: int
    waiting: int
    delivered: int
    paused_until: dt.datetime | None = None

    @classmethod
    def of(cls, info: Mapping[str, Any], subjects: Subjects) -> Queue | None:
        """A consumer as the server describes it; None for one that delivers no model's jobs."""
        address = queue_address(info["config"].get("filter_subject", ""), subjects)
        if address is None:
            return None
        return cls(
            model=address.model,
            job_class=address.job_class,
            consumer=info["name"],
            pending=info["num_pending"],
            ack_pending=info["num_ack_pending"],
            redelivered=info["num_redelivered"],
            waiting=info["num_waiting"],
            delivered=info["delivered"]["stream_seq"],
            paused_until=paused_until(info),
        )


class ResultSummary(msgspec.Struct, frozen=True, kw_only=True):
    """The stored result of a job, without its content.

    Attributes:
        status: How it ended.
        code: The error's, where it is one.
        attempt: The attempt that ended it.
        worker: The worker that answered.
        submission: The submission that it belongs to.
        stored: When it was stored.
    """

    status: Status | None
    code: str | None
    attempt: int | None
    worker: str | None
    submission: int | None
    stored: dt.datetime


class CancelMark(msgspec.Struct, frozen=True, kw_only=True):
    """The newest cancel of a job.

    Attributes:
        requested: When.
        submission: The only submission to cancel; None: all up to that time.
    """

    requested: dt.datetime
    submission: int | None


class JobReport(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that is stored about one job.

    Attributes:
        owner: Whose job.
        job: Its id.
        queued: Its submissions that have not ended.
        result: Its newest result.
        cancel: Its newest cancel.
        letters: Its dead letters.
        attempts: The highest attempt of which a chunk, a result or a dead letter is stored.
    """

    owner: str
    job: str
    queued: list[QueuedJob]
    result: ResultSummary | None
    cancel: CancelMark | None
    letters: list[DeadLetter]
    attempts: int | None

    @property
    def known(self) -> bool:
        """Whether anything is stored about it."""
        return bool(self.queued or self.letters or self.result or self.cancel or self.attempts)


def job_address(subject: str, subjects: Subjects) -> JobAddress | None:
    """The address in a job's subject; None for any other subject."""
    try:
        return subjects.parse_job(subject)
    except InvalidSubject:
        return None


def queue_address(filter: str, subjects: Subjects) -> JobAddress | None:
    """Model and class of a consumer's jobs; owner and kind mean nothing. None without such a filter."""
    base = filter.removesuffix(".*.*")
    return job_address(f"{base}.any.tokens", subjects) if base != filter else None


def paused_until(info: Mapping[str, Any]) -> dt.datetime | None:
    """The end of a consumer's pause, if it is paused."""
    until = info["config"].get("pause_until")
    return parse_time(until) if until and info.get("paused") else None


def job_id(stored: Stored) -> str:
    """A queued job's id, as a worker reads it."""
    named = stored.headers.get(headers.JOB_ID) or stored.headers.get(headers.MSG_ID)
    try:
        if named:
            escape(named)
            return named
    except InvalidSubject:
        pass
    return str(stored.sequence)


def _last_tokens(subject: str) -> tuple[str | None, str | None]:
    model, kind = subject.split(".")[-2:]
    try:
        return unescape(model), kind
    except InvalidSubject:
        return model, kind
