"""Durable jobs: naming, submitting and cancelling one."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Mapping
from typing import Final

import msgspec

from inferbus.schemas import headers
from inferbus.schemas.errors import BusUnavailable, CallerError, InferbusError, ModelNotFound, Overloaded
from inferbus.schemas.objects import object_header
from inferbus.workers.bus.connection.bus import Bus
from inferbus.workers.bus.errors import (
    NOT_FOUND,
    ApiError,
    NoResponders,
    StreamFull,
    SubjectFull,
)
from inferbus.workers.bus.fleet.registry import entry_subject, parse_entry
from inferbus.workers.bus.interface import PubAck
from inferbus.workers.bus.jetstream import layout
from inferbus.workers.bus.jetstream.client import JetStream
from inferbus.workers.bus.jetstream.objects import Objects
from inferbus.workers.client.errors import JobIdUsed, JobNotFound
from inferbus.workers.client.messages import submission_of
from inferbus.workers.client.models import serving
from inferbus.workers.client.reads import Unreadable, submissions
from inferbus.workers.client.records import job_address

HEADROOM: Final = 4096
"""Bytes left to a job's headers: a body that leaves less is stored apart."""


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """Names a submitted job.

    Attributes:
        id: Its id; unique for its owner.
        owner: Who submitted it.
        submission: The submission's sequence in the NATS stream; None for a job that is known by its id
            alone.
        model: The served model name; None where it is not known.
        duplicate: Whether it had been submitted before, and this submission was dropped.
    """

    id: str
    owner: str
    submission: int | None = None
    model: str | None = None
    duplicate: bool = False

    def matches(self, message_headers: Mapping[str, str]) -> bool:
        """Whether a message belongs to this submission or a later one, not to an earlier one of the same id.

        A submission whose successor has a result gets none of its own.
        """
        submission = submission_of(message_headers)
        return submission is not None and (self.submission is None or submission >= self.submission)


def message_id(job: str, subject: str, content_type: str, data: bytes) -> str:
    """The message id under which the server recognises a repeated submission.

    The server compares it with those of all owners. So it is derived from what another owner cannot know: one
    who guesses a job's id and submits under it must not make the job a duplicate, which would never run.

    Args:
        job: The job's id.
        subject: Of the job; it names the owner.
        content_type: Of the body.
        data: The body.
    """
    parts = (job.encode(), subject.encode(), content_type.encode(), data)
    digest = hashlib.blake2b(digest_size=20)
    for part in parts:
        digest.update(len(part).to_bytes(8, "big") + part)
    return digest.hexdigest()


async def publish_job(bus: Bus, subject: str, data: bytes, message_headers: Mapping[str, str]) -> PubAck:
    """Stores a job; a body over the server's payload limit apart from it.

    It is sent again where no acknowledgement comes; its `Nats-Msg-Id` keeps it from being stored twice.

    Raises:
        PayloadTooLarge: Over `limits.OBJECT_BYTES`, or over the server's limit where nothing larger may be
            stored; nothing was sent.
        Overloaded: The queue is full, or this owner's part of it; try again later.
        ModelNotFound: Nobody has ever served jobs of this model.
        BusUnavailable: No NATS stream accepted it, or the acknowledgement did not arrive.
    """
    try:
        if len(data) > bus.max_payload - HEADROOM:
            apart = await Objects(bus).store(bus.subjects.parse_job(subject).owner, data)
            data, message_headers = b"", {**message_headers, **object_header(apart)}
        return await JetStream(bus).store(subject, data, message_headers, resend=True)
    except NoResponders:
        raise await _untaken(bus, bus.subjects.parse_job(subject).model) from None
    except SubjectFull:
        raise Overloaded("the job was not accepted: its owner has as many open jobs as it may") from None
    except StreamFull as error:
        raise Overloaded(f"the job was not accepted: the queue is full: {error.description}") from None
    except ApiError as error:
        raise BusUnavailable(f"the job was not accepted: {error.description}") from None


async def _untaken(bus: Bus, model: str) -> InferbusError:
    """Why no stream takes a model's jobs, as far as the user may know."""
    try:
        entries = await JetStream(bus).read(layout.WORKERS, entry_subject(bus.subjects))
    except ApiError:
        return BusUnavailable("no stream takes jobs: has a worker been started?")
    except BusUnavailable:
        return BusUnavailable(f"no stream takes jobs of the model {model!r}: has it ever been served?")
    workers = []
    for entry in entries:
        with contextlib.suppress(CallerError):
            workers.append(parse_entry(entry))
    served = serving(each for each in workers if each is not None)
    if model in served:
        return BusUnavailable(f"no stream takes jobs of the model {model!r} at the moment")
    names = ", ".join(served)
    known = f"served are: {names}" if names else "no worker is ready, see `inferbus workers`"
    return ModelNotFound(f"nobody has ever served the model {model!r}; {known}", param="model")


async def find_job(bus: Bus, owner: str, job: str, submission: int | None = None) -> Job:
    """The newest submission of an id, or a certain one: queued, running or ended.

    A worker looks through the owner's queued jobs, as far as they are newer than the stored result. Where no
    worker answers and this user may not read them itself, only the result and the stored chunks count.

    Raises:
        JobNotFound: Nothing is stored of it.
        BusUnavailable: The server did not answer.
    """
    handle = Job(id=job, owner=owner, submission=submission)
    ended = await _ended(bus, handle)
    since = submission or (ended or 0) + 1
    try:
        queued = await submissions(bus, owner, job, since)
    except Unreadable:
        return handle if ended is None or submission else msgspec.structs.replace(handle, submission=ended)
    if submission is not None:
        queued = [each for each in queued if each.sequence == submission]
    if queued:
        newest = queued[-1]
        address = job_address(newest.subject, bus.subjects)
        model = None if address is None else address.model
        return msgspec.structs.replace(handle, submission=newest.sequence, model=model)
    # It may have ended between the two looks.
    ended = ended or await _ended(bus, handle)
    if ended is None:
        which = job if submission is None else f"{job}, submission {submission},"
        raise JobNotFound(f"there is no job {which} of the owner {owner}: neither queued nor ended")
    return handle if submission else msgspec.structs.replace(handle, submission=ended)


async def submitted_earlier(bus: Bus, owner: str, job: str, message: str) -> Job | None:
    """The job that a request was submitted as before, queued or ended; None: it was not, as far as is known.

    Args:
        bus: The connection.
        owner: Whose job.
        job: Its id.
        message: The request's `message_id`.

    Raises:
        JobIdUsed: The stored result of this id is another request's.
        BusUnavailable: The server did not answer.
    """
    handle = Job(id=job, owner=owner, duplicate=True)
    stored = await JetStream(bus).last(layout.RESULTS, bus.subjects.result(owner, job))
    if stored is not None and not stored.forwarded and handle.matches(stored.headers):
        if stored.headers.get(headers.MESSAGE_ID) != message:
            raise JobIdUsed(f"the job id {job} was used for another request", param="job_id")
        return msgspec.structs.replace(handle, submission=submission_of(stored.headers))
    try:
        queued = await submissions(bus, owner, job, 1)
    except Unreadable:
        return None
    return msgspec.structs.replace(handle, submission=queued[-1].sequence) if queued else None


async def _ended(bus: Bus, handle: Job) -> int | None:
    """The submission of the newest stored result or chunk, if it belongs to this job."""
    subjects = bus.subjects
    for stream_name, subject in (
        (layout.RESULTS, subjects.result(handle.owner, handle.id)),
        (layout.STREAM, subjects.stream(handle.owner, handle.id)),
    ):
        try:
            stored = await JetStream(bus).last(stream_name, subject)
        except ApiError as error:
            if error.status != NOT_FOUND:
                raise
            continue
        if stored is not None and not stored.forwarded and handle.matches(stored.headers):
            return submission_of(stored.headers)
    return None


async def publish_cancel(bus: Bus, job: Job) -> None:
    """Asks for a job to be stopped wherever it is, also while it is queued.

    Raises:
        Overloaded: There is no room for it; the job goes on.
        BusUnavailable: The server did not take it.
    """
    only = {} if job.submission is None else {headers.SUBMISSION: str(job.submission)}
    try:
        await JetStream(bus).store(bus.subjects.cancel(job.owner, job.id), b"", only)
    except SubjectFull:
        raise Overloaded("the cancel was refused, the job goes on: too many cancels of this id") from None
    except StreamFull as error:
        raise Overloaded(
            f"the cancel was refused, the job goes on: there is no room for it: {error.description}"
        ) from None
