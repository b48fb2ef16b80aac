"""Sends callers what is stored of their own jobs.

Permissions of NATS cannot limit a read of several messages to an owner: its subject names the stream only.
The subject of this service names the owner, and the worker reads with its own rights.
"""

from __future__ import annotations

from typing import Final, get_args

import structlog

from inferbus.schemas import headers
from inferbus.schemas.codec import encode
from inferbus.schemas.errors import (
    BusUnavailable,
    CallerError,
    ErrorAnswer,
    InferbusError,
    InvalidRequest,
    InvalidSubject,
    Overloaded,
)
from inferbus.schemas.headers import Readable
from inferbus.schemas.subjects import JobKey
from inferbus.workers.bus.connection.bus import Bus
from inferbus.workers.bus.connection.message import Message
from inferbus.workers.bus.errors import NOT_FOUND, ApiError
from inferbus.workers.bus.interface import Stored
from inferbus.workers.bus.jetstream import layout
from inferbus.workers.bus.jetstream.client import JetStream
from inferbus.workers.jobs.attempt import durable
from inferbus.workers.jobs.settings import JobSettings
from inferbus.workers.roles.intake import Tasks

log = structlog.get_logger()

QUEUE_GROUP: Final = "readers"
"""Of the workers of all models: what is stored does not depend on the model."""

PAGE: Final = 256
"""Stored messages that one request reads at most."""

CONCURRENT: Final = 4
"""Requests that one worker serves at once: each may hold a page of 4 MiB."""

_READABLE: Final[dict[str, Readable]] = {name: name for name in get_args(Readable)}
_SERVER: Final = "nats-"


class Reads:
    """The service `infer.read.<owner>.<job>` of one worker.

    It answers a request with one page: the stored messages, then an empty one that says where the next page
    begins (`Infer-Next`) and how many messages there are beyond this one (`Infer-Pending`).

    Args:
        bus: Connected.
        settings: Of this worker.
        tasks: Keeps what runs.
    """

    def __init__(self, bus: Bus, settings: JobSettings, tasks: Tasks) -> None:
        self._bus = bus
        self._settings = settings
        self._tasks = tasks
        self._serving = 0

    def asked(self, message: Message) -> None:
        """Takes a request; one that cannot be answered is logged."""
        subjects = self._settings.subjects
        try:
            key = subjects.parse_key(message.subject, "read")
            # An owner's own stream is no place for what was read from it.
            inboxes = self._settings.replies
            reply = subjects.check_reply(message.reply, owner=key.owner, prefixes=inboxes)
            if not reply.startswith(inboxes):
                raise InvalidRequest("stored messages are sent to an inbox only")
        except CallerError as error:
            log.warning("read.ignored", code=error.code)
            return
        wanted = _READABLE.get(message.headers.get(headers.READ, ""))
        first = headers.number(message.headers, headers.FROM)
        if wanted is None or first is None:
            self._refuse(key, reply, InvalidRequest(f"{headers.READ} and {headers.FROM} say what to read"))
        elif self._serving >= CONCURRENT:
            self._refuse(key, reply, Overloaded("this worker serves as many reads as it may"))
        else:
            self._serving += 1
            self._tasks.start(self._serve(key, reply, wanted, first))

    async def _serve(self, key: JobKey, reply: str, wanted: Readable, first: int) -> None:
        try:
            page, beyond = await self._page(key, wanted, first)
            count = 0
            for stored in page:
                if (answer := self._answer(stored, wanted, key)) is not None:
                    await self._bus.ready()
                    self._bus.send(reply, *answer)
                    count += 1
            end = {
                headers.CHUNKS: str(count),
                headers.NEXT: str(page[-1].sequence + 1 if page else first),
                headers.PENDING: str(beyond if page else 0),
            }
            self._bus.send(reply, b"", end)
        except BusUnavailable as error:
            self._refuse(key, reply, error)
        finally:
            self._serving -= 1

    async def _page(self, key: JobKey, wanted: Readable, first: int) -> tuple[list[Stored], int]:
        subjects = self._settings.subjects
        if wanted == "chunks":
            stream, subject = layout.STREAM, subjects.stream(key.owner, key.job)
        elif wanted == "batches":
            stream, subject = layout.BATCHES, layout.batch_key(subjects, key.owner, "*")
        else:
            stream, subject = layout.JOBS, subjects.jobs_of_owner(key.owner)
        try:
            return await JetStream(self._bus).page(stream, subject, first=max(first, 1), batch=PAGE)
        except ApiError as error:
            if error.status != NOT_FOUND:
                raise
            return [], 0

    def _refuse(self, key: JobKey, reply: str, error: InferbusError) -> None:
        self._bus.send(reply, encode(ErrorAnswer(error=error.body(), job=key.job)))

    def _answer(self, stored: Stored, wanted: Readable, key: JobKey) -> tuple[bytes, dict[str, str]] | None:
        """A stored message as it is sent on; None for one that is not wanted."""
        if wanted == "submissions":
            if self._job_of(stored) != key.job:
                return None
            return b"", {headers.SUBMISSION: str(stored.sequence), headers.SUBJECT: stored.subject}
        if wanted in ("jobs", "batches"):
            name = stored.headers.get(headers.JOB_ID, "")
            if wanted == "jobs" and not name.startswith(f"{key.job}-"):
                return None
            return stored.data, {headers.SUBMISSION: str(stored.sequence), headers.JOB_ID: name}
        if stored.forwarded:
            return None
        own = {name: value for name, value in stored.headers.items() if not name.lower().startswith(_SERVER)}
        return stored.data, own

    def _job_of(self, stored: Stored) -> str | None:
        settings = self._settings
        try:
            envelope = durable(stored, number=1, subjects=settings.subjects, replies=settings.replies)
        except InvalidSubject:
            return None
        return envelope.attempt.job
