"""Reads what is stored of the owner's own jobs, through a worker or directly.

The workers' service `infer.read.<owner>.<job>` needs a permission that names the owner. Where no worker
answers, the streams are read directly, which only users with the permission to read all of them may.
"""

from __future__ import annotations

import contextlib
import datetime as dt
from collections.abc import AsyncIterator
from typing import Final

import msgspec
import structlog

from inferbus.schemas import codec, headers
from inferbus.schemas.errors import BusUnavailable, ErrorAnswer, InferbusError
from inferbus.schemas.headers import Readable
from inferbus.workers.bus.connection.bus import Bus
from inferbus.workers.bus.connection.message import Message
from inferbus.workers.bus.errors import NOT_FOUND, ApiError, NotPermitted
from inferbus.workers.bus.interface import Stored
from inferbus.workers.bus.jetstream import browse, layout
from inferbus.workers.client.records import job_id

log = structlog.get_logger()

ANSWER_TIMEOUT: Final = 2.0
"""Seconds between two messages of a page."""


class Submission(msgspec.Struct, frozen=True):
    """A queued submission of a job: its sequence, and the subject that it came on."""

    sequence: int
    subject: str


class Unreadable(BusUnavailable):
    """No worker answers, and this user may not read the streams itself."""


class Page(msgspec.Struct):
    """Stored messages, and the stream sequence at which the next ones begin."""

    messages: list[Message | Stored]
    next: int


async def chunks(bus: Bus, owner: str, job: str, first: int = 1) -> Page:
    """The stored chunks of a job, oldest first.

    Args:
        bus: The connection.
        owner: Of the job.
        job: Its id.
        first: The stream sequence to begin at.

    Raises:
        Unreadable: They cannot be read now.
        BusUnavailable: The server did not answer.
    """
    found = Page([], first)
    try:
        async for page in _served(bus, "chunks", owner, job, first):
            found.messages += page.messages
            found.next = page.next
    except BusUnavailable as problem:
        try:
            subject = bus.subjects.stream(owner, job)
            async for stored, _ in _direct(bus, layout.STREAM, subject, found.next, problem):
                if stored:
                    found.messages += stored
                    found.next = stored[-1].sequence + 1
        except ApiError as error:
            if error.status != NOT_FOUND:
                raise
            # A stream in memory is lost when its server restarts; the results are not.
    return found


async def submissions(bus: Bus, owner: str, job: str, first: int = 1) -> list[Submission]:
    """The queued submissions of a job, oldest first; arguments and errors as for `chunks`."""
    found: list[Submission] = []
    try:
        async for page in _served(bus, "submissions", owner, job, first):
            for message in page.messages:
                sequence = headers.number(message.headers, headers.SUBMISSION)
                if sequence is not None:
                    found.append(Submission(sequence, message.headers.get(headers.SUBJECT, "")))
        return found
    except BusUnavailable as problem:
        found.clear()
        try:
            async for stored, _ in _direct(
                bus, layout.JOBS, bus.subjects.jobs_of_owner(owner), first, problem
            ):
                found += [Submission(each.sequence, each.subject) for each in stored if job_id(each) == job]
        except ApiError as error:
            if error.status != NOT_FOUND:
                raise
        return found


async def through_a_worker(bus: Bus, wanted: Readable, owner: str, name: str, first: int = 1) -> list[Stored]:
    """What a worker reads for a user who may not: the queued jobs of a batch, or all batches.

    Args:
        bus: The connection.
        wanted: `jobs` or `batches`.
        owner: Whose.
        name: The batch's id, for its jobs.
        first: The stream sequence to begin at.

    Raises:
        BusUnavailable: No worker answered.
    """
    found: list[Stored] = []
    async for page in _served(bus, wanted, owner, name, first):
        for message in page.messages:
            sequence = headers.number(message.headers, headers.SUBMISSION)
            if sequence is not None:
                stored = Stored(
                    subject=message.subject,
                    data=message.data,
                    headers=message.headers,
                    sequence=sequence,
                    time=dt.datetime.now(dt.UTC),
                )
                found.append(stored)
    return found


async def _direct(
    bus: Bus, stream: str, subject: str, first: int, problem: BusUnavailable
) -> AsyncIterator[tuple[list[Stored], int]]:
    try:
        async for page in browse.pages(bus, stream, subject, first=first):
            yield page
    except NotPermitted as refusal:
        raise Unreadable(
            f"no worker reads it ({problem.message}), and this user may not: {refusal.message}"
        ) from None


async def _served(bus: Bus, wanted: Readable, owner: str, job: str, first: int) -> AsyncIterator[Page]:
    """Pages as a worker sends them."""
    while True:
        page, pending = await _page(bus, wanted, owner, job, first)
        yield page
        if not pending or page.next <= first:
            return
        first = page.next


async def _page(bus: Bus, wanted: Readable, owner: str, job: str, first: int) -> tuple[Page, int]:
    subject = bus.subjects.read(owner, job)
    request = {headers.READ: wanted, headers.FROM: str(first)}
    messages: list[Message | Stored] = []
    async with contextlib.aclosing(bus.ask(subject, b"", request, timeout=ANSWER_TIMEOUT)) as answers:
        async for message in answers:
            if (following := headers.number(message.headers, headers.NEXT)) is not None:
                if headers.number(message.headers, headers.CHUNKS) != len(messages):
                    raise BusUnavailable("part of what is stored was lost on the way")
                return Page(messages, following), headers.number(message.headers, headers.PENDING) or 0
            _raise_refusal(message)
            messages.append(message)
    raise AssertionError("unreachable")


def _raise_refusal(message: Message) -> None:
    """Raises what a worker answers instead of a page; a chunk may hold an error as well, with its attempt."""
    if headers.SUBMISSION in message.headers:
        return
    try:
        answer = codec.decode_any(message.data, ErrorAnswer)
    except InferbusError:
        return
    raise BusUnavailable(answer.error.message)
