"""Cancellation: a mark in a stream that outlives the message, so that a queued job is hit as well.

A cancel aims at one submission: at the one it names by its stream sequence
(`Infer-Submission`), else at every submission of that job that the server had
stored before the cancel. A later submission with the same id is never hit.
"""

from __future__ import annotations

import datetime as dt

import structlog

from schemas import headers
from schemas.errors import Cancelled, InvalidSubject
from schemas.subjects import JobKey, Subjects
from workers.bus.interface import Broker, Stored
from workers.bus.layout import CANCEL
from workers.jobs.scope import Scope, Scopes

log = structlog.get_logger()


class Cancels:
    """Applies cancel messages to this worker's attempts."""

    def __init__(self, broker: Broker, scopes: Scopes, subjects: Subjects) -> None:
        self._broker = broker
        self._scopes = scopes
        self._subjects = subjects

    async def arrived(self, subject: str) -> None:
        """A cancel message came by: ends the attempts here that it aims at."""
        try:
            key = self._subjects.parse_key(subject, "cancel")
        except InvalidSubject:
            log.warning("cancel.ignored", reason="not a cancel subject")
            return
        scopes = self._scopes.find(key)
        if not scopes:
            return
        mark = await self.mark(key)
        for scope in scopes:
            if mark is not None and hits(mark, submission=scope.submission, arrived=scope.arrived):
                end(scope)

    async def mark(self, key: JobKey) -> Stored | None:
        """The newest cancel of a job, if there is one.

        Raises:
            BusUnavailable: The server did not answer.
        """
        return await self._broker.last(CANCEL, self._subjects.cancel(key.owner, key.job))


def end(scope: Scope) -> None:
    """Ends an attempt because its owner wants it."""
    scope.end(Cancelled("cancelled by its owner"))


def hits(mark: Stored, *, submission: int | None, arrived: dt.datetime) -> bool:
    """Whether a cancel aims at a submission.

    Args:
        mark: The stored cancel.
        submission: The job's stream sequence; None for a live request.
        arrived: When the server stored the job, or a worker received the live request.
    """
    named = mark.headers.get(headers.SUBMISSION)
    if named is not None and submission is not None:
        return named == str(submission)
    return mark.time >= arrived
