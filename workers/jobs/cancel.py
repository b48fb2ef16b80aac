"""Cancellation. Cancels are kept in a stream, so that one also applies to a job that is still queued.

A cancel aims at one submission: at the one it names by its stream sequence
(`Infer-Submission`), else at every submission of that job that the server had
stored before the cancel. A later submission with the same id is never hit.
"""

from __future__ import annotations

import asyncio
import datetime as dt
from collections.abc import Mapping
from typing import Final

import structlog

from inferbus.schemas import headers
from inferbus.schemas.errors import BusUnavailable, Cancelled, InvalidSubject
from inferbus.schemas.subjects import LIVE_OWNER, Subjects
from inferbus.workers.bus.interface import Broker, Stored
from inferbus.workers.bus.jetstream.layout import CANCEL
from inferbus.workers.jobs.scope import Scope, Scopes

log = structlog.get_logger()

PAUSE: Final = 1.0
"""Seconds before cancels are looked for again where the server did not answer."""


class Cancels:
    """Applies cancel messages to this worker's attempts.

    Args:
        broker: Keeps the stream.
        scopes: The attempts under way.
        subjects: Of this bus.
    """

    def __init__(self, broker: Broker, scopes: Scopes, subjects: Subjects) -> None:
        self._broker = broker
        self._scopes = scopes
        self._subjects = subjects

    def arrived(self, subject: str, fields: Mapping[str, str]) -> None:
        """Ends the attempts here that a cancel message aims at.

        Whatever runs here now was submitted before the cancel. A live request may be handled after a cancel
        that was sent behind it, so the cancel is kept for a while where it finds none.

        Args:
            subject: Of the message.
            fields: Its headers.
        """
        try:
            key = self._subjects.parse_key(subject, "cancel")
        except InvalidSubject:
            log.warning("cancel.ignored", reason="not a cancel subject")
            return
        named = fields.get(headers.SUBMISSION)
        scopes = self._scopes.find(key)
        for scope in scopes:
            if named is None or scope.submission is None or named == str(scope.submission):
                end(scope)
        if not scopes and key.owner == LIVE_OWNER:
            self._scopes.end_early(key, _cancelled())

    async def aimed_at(self, scope: Scope) -> bool:
        """Whether a stored cancel aims at an attempt at a durable job.

        The newest one is read first, since nearly always there is none. Where it aims at another submission,
        the older ones are read too: each submission under one id has cancels of its own.

        Raises:
            BusUnavailable: The server did not answer.
        """
        subject = self._subjects.cancel(scope.key.owner, scope.key.job)
        newest = await self._broker.last(CANCEL, subject)
        if newest is None or hits(newest, submission=scope.submission, stored=scope.stored):
            return newest is not None
        marks = await self._broker.read(CANCEL, subject)
        return any(hits(mark, submission=scope.submission, stored=scope.stored) for mark in marks)

    async def catch_up(self) -> None:
        """After NATS was away: ends the attempts whose cancel was missed meanwhile."""
        for scope in self._scopes:
            while scope in self._scopes.find(scope.key):
                try:
                    if await self.aimed_at(scope):
                        end(scope)
                    break
                except BusUnavailable as error:
                    log.warning("cancels.not_read", reason=error.message)
                    await asyncio.sleep(PAUSE)


def _cancelled() -> Cancelled:
    return Cancelled("cancelled by its owner")


def end(scope: Scope) -> None:
    """Ends an attempt because its owner wants it."""
    scope.end(_cancelled())


def hits(mark: Stored, *, submission: int | None, stored: dt.datetime | None) -> bool:
    """Whether a stored cancel aims at a durable job.

    A cancel has an empty body and comes from its publisher. JetStream's acknowledgements, which a client can
    have sent to anybody's cancel subject, have a body; what else the server sends for somebody is marked.

    Args:
        mark: The cancel.
        submission: The job's stream sequence.
        stored: When the server stored the job, by the same clock as the cancel; None where it did not.
    """
    if mark.data or mark.forwarded:
        return False
    named = mark.headers.get(headers.SUBMISSION)
    if named is not None:
        return named == str(submission)
    return stored is not None and mark.time >= stored
