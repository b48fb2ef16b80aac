"""One attempt at one request: who asked, where the answer goes, until when."""

from __future__ import annotations

import asyncio
import datetime as dt
import hashlib
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Final

import msgspec

from inferbus.schemas import codec, headers, kinds, limits
from inferbus.schemas.computed import ComputedRequest
from inferbus.schemas.errors import CallerError, InvalidSubject, UnsupportedContentType
from inferbus.schemas.subjects import (
    KINDS,
    LIVE_OWNER,
    UNKNOWN,
    AnyKind,
    JobClass,
    JobKey,
    Subjects,
    escape,
)
from inferbus.workers.bus.interface import Stored

_LARGE_BODIES: Final = ThreadPoolExecutor(max_workers=1, thread_name_prefix="bodies")
"""Reads large bodies, one at a time: each needs several times its size in memory while it is read."""


class Attempt(msgspec.Struct, frozen=True, kw_only=True):
    """One attempt at a request or job.

    Attributes:
        job: The job's id, as the caller knows it.
        owner: Who submitted it, from the subject; `live` for live requests.
        model: From the subject.
        kind: From the subject; `UNKNOWN` where it is none of the contract.
        number: From 1.
        job_class: Of a durable job; None for a live request.
        submission: Stream sequence of a durable job; None for a live request.
        arrived: When the job was stored or received.
        reply: Subject of the answer.
        content_type: Of request and answer.
        deadline: When it expires.
        bundled: Whether it is one of several requests in one job; no chunks are sent of it.
        passed: Whether another worker passed it on; it is not passed on again.
    """

    job: str
    owner: str
    model: str
    kind: AnyKind
    number: int
    job_class: JobClass | None
    submission: int | None
    arrived: dt.datetime
    reply: str
    content_type: str = codec.JSON
    deadline: dt.datetime | None = None
    bundled: bool = False
    passed: bool = False

    @property
    def key(self) -> JobKey:
        """As cancel, stream and result subjects name it."""
        return JobKey(self.owner, self.job)

    @property
    def answer_id(self) -> str:
        """32 hexadecimal digits, the same for every attempt at this request, and for no other request."""
        parts = (self.owner, self.job, self.submission, self.arrived.timestamp())
        return hashlib.sha256(repr(parts).encode()).hexdigest()[:32]

    @property
    def durable(self) -> bool:
        """Whether it came from a stream."""
        return self.submission is not None

    def streams(self, request: kinds.WireRequest) -> bool:
        """Whether chunks are wanted: by the body, else yes for durable jobs, else by the kind's default."""
        if self.bundled or isinstance(request, ComputedRequest):
            return False
        return request.stream if request.stream is not None else (self.durable or request.streams)


class Envelope(msgspec.Struct, frozen=True, kw_only=True):
    """A request as it was received, before anything in it was checked.

    Attributes:
        attempt: With defaults in place of every header that may be wrong, so that its owner gets an answer
            even then.
        body: As received.
        headers: As received.
        subjects: Of this bus.
        replies: Prefixes of reply subjects that callers may name.
        problem: Why the body cannot be had, where it is stored apart.
    """

    attempt: Attempt
    body: bytes
    headers: Mapping[str, str]
    subjects: Subjects
    replies: tuple[str, ...]
    problem: CallerError | None = None

    async def open(self) -> tuple[Attempt, kinds.WireRequest]:
        """The attempt with its headers read, and the checked request; a large one is read in a thread.

        Raises:
            CallerError: Of any kind; the answer goes to `self.attempt.reply`.
        """
        if self.problem is not None:
            raise self.problem
        if len(self.body) <= limits.SMALL_BODY:
            return self.read()
        return await asyncio.get_running_loop().run_in_executor(_LARGE_BODIES, self.read)

    def read(self) -> tuple[Attempt, kinds.WireRequest]:
        """`open`, without an event loop."""
        named_id, named_reply = _named_id(self.headers), self.headers.get(headers.REPLY_TO)
        if named_id:
            escape(named_id)
        reply = self.attempt.reply
        if named_reply is not None and self.attempt.durable:
            reply = self.subjects.check_reply(named_reply, owner=self.attempt.owner, prefixes=self.replies)
        attempt = msgspec.structs.replace(
            self.attempt,
            reply=reply,
            content_type=codec.content_type(self.headers.get(headers.CONTENT_TYPE)),
            deadline=headers.parse_deadline(self.headers, arrived=self.attempt.arrived),
        )
        if attempt.kind == UNKNOWN:
            raise InvalidSubject(f"a subject's kind is one of {', '.join(KINDS)}")
        request = kinds.read(attempt.kind, self.body, content_type=attempt.content_type, model=attempt.model)
        return attempt, request


def live(
    message: Stored,
    *,
    reply: str,
    fallback_id: str,
    subjects: Subjects,
    replies: tuple[str, ...],
    passed: bool = False,
) -> Envelope:
    """A live request.

    Args:
        message: As received, without a stream sequence.
        reply: The NATS reply subject.
        fallback_id: The job's id where the caller chose none.
        subjects: Of this bus.
        replies: Prefixes of reply subjects that callers may name.
        passed: Whether another worker passed it on.

    Raises:
        InvalidSubject: Of another family.
        InvalidReplySubject: The worker must not publish there; no answer can be sent.
    """
    subject = message.subject
    address = subjects.parse_passed(subject) if passed else subjects.parse_request(subject, any_kind=True)
    attempt = Attempt(
        job=_usable_id(message.headers) or fallback_id,
        owner=LIVE_OWNER,
        model=address.model,
        kind=address.kind,
        number=1,
        job_class=None,
        submission=None,
        arrived=message.time,
        reply=subjects.check_reply(reply, owner=LIVE_OWNER, prefixes=replies),
        content_type=_readable_type(message.headers),
        passed=passed,
    )
    return Envelope(
        attempt=attempt, body=message.data, headers=message.headers, subjects=subjects, replies=replies
    )


def durable(message: Stored, *, number: int, subjects: Subjects, replies: tuple[str, ...]) -> Envelope:
    """A delivery of a durable job.

    Args:
        message: As stored.
        number: Of the attempt.
        subjects: Of this bus.
        replies: Prefixes of reply subjects that callers may name.

    Raises:
        InvalidSubject: Of another family.
    """
    address = subjects.parse_job(message.subject, any_kind=True)
    job = _usable_id(message.headers) or str(message.sequence)
    attempt = Attempt(
        job=job,
        owner=address.owner,
        model=address.model,
        kind=address.kind,
        number=number,
        job_class=address.job_class,
        submission=message.sequence,
        arrived=message.time,
        reply=subjects.stream(address.owner, job),
        content_type=_readable_type(message.headers),
    )
    return Envelope(
        attempt=attempt, body=message.data, headers=message.headers, subjects=subjects, replies=replies
    )


def unaddressed(message: Stored, *, number: int, subjects: Subjects) -> Attempt:
    """A delivery of a durable job of which nobody can be told, with what can be read of it.

    Args:
        message: As stored.
        number: Of the attempt.
        subjects: Of this bus.
    """
    return Attempt(
        job=_usable_id(message.headers) or str(message.sequence),
        owner="",
        model=subjects.model_of(message.subject),
        kind=UNKNOWN,
        number=number,
        job_class=None,
        submission=message.sequence,
        arrived=message.time,
        reply="",
    )


def facts(attempt: Attempt) -> dict[str, object]:
    """Fields of an attempt's log events."""
    return {
        "job": attempt.job,
        "owner": attempt.owner,
        "kind": attempt.kind,
        "attempt": attempt.number,
        "submission": attempt.submission,
    }


def _named_id(fields: Mapping[str, str]) -> str | None:
    return fields.get(headers.JOB_ID) or fields.get(headers.MSG_ID)


def _usable_id(fields: Mapping[str, str]) -> str | None:
    """The id that the caller chose, unless no subject can carry it."""
    named = _named_id(fields)
    try:
        if named:
            escape(named)
    except InvalidSubject:
        return None
    return named


def _readable_type(fields: Mapping[str, str]) -> str:
    """The content type of error answers: JSON where the caller's is unknown."""
    try:
        return codec.content_type(fields.get(headers.CONTENT_TYPE))
    except UnsupportedContentType:
        return codec.JSON
