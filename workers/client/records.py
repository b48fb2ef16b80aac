"""What an operator sees: dead letters, queued jobs, queues. No request content in any of them."""

from __future__ import annotations

import datetime as dt
from collections.abc import Mapping
from typing import Any, Final

import msgspec

from inferbus.schemas import headers
from inferbus.schemas.errors import InvalidSubject
from inferbus.schemas.headers import Status
from inferbus.schemas.subjects import JobAddress, JobClass, Kind, Subjects, escape, unescape
from inferbus.workers.bus.interface import Stored
from inferbus.workers.bus.jetstream.client import parse_time

NO_END: Final = dt.timedelta(days=3650)
"""How long a pause without an end is asked for; one that is a year or more away counts as such."""


class Letter(msgspec.Struct, frozen=True, kw_only=True):
    """A dead letter, without the body of its job.

    Attributes:
        letter: Its sequence, by which it is named.
        died: When it was written.
        age: Seconds since then.
        model: Of the job.
        kind: Of the job.
        owner: Of the job; None, like all of these, where the letter does not say it.
        job: The job's id.
        job_class: Of the job.
        code: The last error's.
        reason: The last error's message.
        attempts: How many there were.
        worker: Who gave up.
        submission: The job's sequence in the queue.
        deadline: The job's, as its header says it.
        subject: Where the job came on, and goes when it is replayed.
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
    def of(cls, stored: Stored, subjects: Subjects, now: dt.datetime) -> Letter:
        """A letter as it is stored; who may write letters may write nonsense, so nothing is relied on."""
        found = stored.headers
        address = job_address(found.get(headers.SUBJECT, ""), subjects)
        model, kind = _last_tokens(stored.subject)
        return cls(
            letter=stored.sequence,
            died=stored.time,
            age=(now - stored.time).total_seconds(),
            model=address.model if address else model,
            kind=address.kind if address else kind,
            owner=address.owner if address else None,
            job=found.get(headers.JOB_ID),
            job_class=address.job_class if address else None,
            code=found.get(headers.REASON),
            reason=found.get(headers.DETAIL),
            attempts=headers.number(found, headers.ATTEMPT),
            worker=found.get(headers.WORKER),
            submission=headers.number(found, headers.SUBMISSION),
            deadline=found.get(headers.DEADLINE),
            subject=found.get(headers.SUBJECT),
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
        taken: Whether a worker took it and has neither finished it nor is known to be lost; it may also be
            waiting for its next attempt. False: nobody has taken it yet.
    """

    submission: int
    job: str
    owner: str
    model: str
    job_class: JobClass
    kind: Kind
    submitted: dt.datetime
    age: float
    size: int
    taken: bool


class Queue(msgspec.Struct, frozen=True, kw_only=True):
    """The consumer that gives out a model's jobs of one class.

    Attributes:
        model: For this model.
        job_class: Of this class.
        consumer: Its name.
        pending: Jobs that no worker has taken yet.
        ack_pending: Jobs that a worker has, or that wait for their next attempt.
        redelivered: Of those, how many were taken more than once.
        waiting: Open pull requests: workers that would take a job.
        delivered: The newest submission that was ever given out.
        paused_until: Nothing is given out until then; None: it is not paused.
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
        """A consumer as the server tells it; None for one that gives out no model's jobs."""
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


class Ending(msgspec.Struct, frozen=True, kw_only=True):
    """The stored result of a job, without its content.

    Attributes:
        status: How it ended.
        code: The error's, where it is one.
        attempt: Which attempt it was.
        worker: Who answered.
        submission: The submission that it answers.
        stored: When.
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
        asked: When.
        submission: The only submission that it means; None: all that were there by then.
    """

    asked: dt.datetime
    submission: int | None


class JobReport(msgspec.Struct, frozen=True, kw_only=True):
    """All that is known of one job.

    Attributes:
        owner: Whose job.
        job: Its id.
        queued: Its submissions that have not ended.
        result: Its newest result.
        cancel: Its newest cancel.
        letters: Its dead letters.
        attempts: The newest attempt that left a trace: a chunk, a result or a dead letter.
    """

    owner: str
    job: str
    queued: list[QueuedJob]
    result: Ending | None
    cancel: CancelMark | None
    letters: list[Letter]
    attempts: int | None

    @property
    def known(self) -> bool:
        """Whether anything is."""
        return bool(self.queued or self.letters or self.result or self.cancel or self.attempts)


def job_address(subject: str, subjects: Subjects) -> JobAddress | None:
    """What the subject of a job says; None for any other."""
    try:
        return subjects.parse_job(subject)
    except InvalidSubject:
        return None


def queue_address(filter: str, subjects: Subjects) -> JobAddress | None:
    """Whose jobs a consumer gives out; owner and kind mean nothing. None where that is no model and class."""
    base = filter.removesuffix(".*.*")
    return job_address(f"{base}.any.tokens", subjects) if base != filter else None


def paused_until(info: Mapping[str, Any]) -> dt.datetime | None:
    """Until when a consumer is paused, if it is."""
    until = info["config"].get("pause_until")
    return parse_time(until) if until and info.get("paused") else None


def job_id(stored: Stored) -> str:
    """A queued job's id, as a worker will call it."""
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
