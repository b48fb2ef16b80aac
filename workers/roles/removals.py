"""Removes for callers what is stored of their own: results that they have written down, what batches leave.

Permissions of NATS cannot limit a purge to an owner: its subject names the stream only. The subject of this
service names the owner, and the worker purges with its own rights.
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
    Overloaded,
)
from inferbus.schemas.headers import Removable
from inferbus.schemas.subjects import JobKey
from inferbus.workers.bus.connection.bus import Bus
from inferbus.workers.bus.connection.message import Message
from inferbus.workers.bus.jetstream.removal import purge
from inferbus.workers.jobs.settings import JobSettings
from inferbus.workers.roles.intake import Tasks

log = structlog.get_logger()

CONCURRENT: Final = 64
"""Requests that one worker serves at once: a batch's submitter sends 32."""

_REMOVABLE: Final[dict[str, Removable]] = {name: name for name in get_args(Removable)}


class Removals:
    """The service `infer.remove.<owner>.<name>` of one worker.

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
        subjects, inboxes = self._settings.subjects, self._settings.replies
        try:
            key = subjects.parse_key(message.subject, "remove")
            reply = subjects.check_reply(message.reply, owner=key.owner, prefixes=inboxes)
        except CallerError as error:
            log.warning("removal.ignored", code=error.code)
            return
        what = _REMOVABLE.get(message.headers.get(headers.REMOVE, ""))
        if what is None:
            self._refuse(key, reply, InvalidRequest(f"{headers.REMOVE} says what to remove"))
        elif self._serving >= CONCURRENT:
            self._refuse(key, reply, Overloaded("this worker serves as many removals as it may"))
        else:
            self._serving += 1
            first = headers.number(message.headers, headers.FROM) or 1
            self._tasks.start(self._serve(key, reply, what, first))

    async def _serve(self, key: JobKey, reply: str, what: Removable, first: int) -> None:
        try:
            await purge(self._bus, key.owner, key.job, what, first)
            self._bus.send(reply, b"")
        except BusUnavailable as error:
            self._refuse(key, reply, error)
        finally:
            self._serving -= 1

    def _refuse(self, key: JobKey, reply: str, error: InferbusError) -> None:
        self._bus.send(reply, encode(ErrorAnswer(error=error.body(), job=key.job)))
