"""Cancellation: a mark in a stream that outlives the message, so that a queued job is hit as well.

A cancel aims at one submission: at the one it names by its stream sequence
(`Infer-Submission`), else at every submission of that job that the server had
stored before the cancel. A later submission with the same id is never hit.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Mapping

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

    def arrived(self, subject: str, found: Mapping[str, str]) -> None:
        """A cancel message came by: ends the attempts here that it aims at.

        It overtakes nothing that was submitted after it, so whatever runs here now was there before.
        """
        try:
            key = self._subjects.parse_key(subject, "cancel")
        except InvalidSubject:
            log.warning("cancel.ignored", reason="not a cancel subject")
            return
        named = found.get(headers.SUBMISSION)
        for scope in self._scopes.find(key):
            if named is None or scope.submission is None or named == str(scope.submission):
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


def hits(mark: Stored, *, submission: int | None, stored: dt.datetime) -> bool:
    """Whether a stored cancel aims at a durable job.

    Args:
        mark: The cancel.
        submission: The job's stream sequence.
        stored: When the server stored the job, by the same clock as the cancel.
    """
    named = mark.headers.get(headers.SUBMISSION)
    return named == str(submission) if named is not None else mark.time >= stored
