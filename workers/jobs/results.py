"""The stored results of durable jobs: exactly one for every submission."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from inferbus.schemas import headers
from inferbus.schemas.errors import BusUnavailable
from inferbus.workers.bus.interface import Broker, Stored
from inferbus.workers.bus.jetstream.layout import RESULTS
from inferbus.workers.jobs.attempt import Attempt
from inferbus.workers.jobs.duplicate import repeats
from inferbus.workers.jobs.fields import number
from inferbus.workers.jobs.settings import JobSettings
from inferbus.workers.jobs.storage import Storage

_IDENTITY: Final = (headers.SUBMISSION, headers.ATTEMPT, headers.WORKER)
"""What distinguishes one attempt's result from every other's."""


class ResultStore:
    """The results stream, for one worker.

    Args:
        broker: Keeps it.
        settings: Of the worker.
        storage: Outlasts outages.
    """

    def __init__(self, broker: Broker, settings: JobSettings, storage: Storage) -> None:
        self._broker = broker
        self._settings = settings
        self._storage = storage

    async def of(self, attempt: Attempt) -> FinalResult:
        """Looks up where the result of an attempt belongs; to be called before the attempt begins.

        Raises:
            BusUnavailable: The server did not answer.
        """
        subject = self._settings.subjects.result(attempt.owner, attempt.job)
        newest = await self._broker.last(RESULTS, subject)
        return FinalResult(self._broker, subject, attempt.submission or 0, newest, self._storage)

    async def of_repeated(self, attempt: Attempt, message: Stored) -> Stored | None:
        """The result of the submission that this one repeats, if it repeats one; see `duplicate`.

        Raises:
            BusUnavailable: The server did not answer.
        """
        subject = self._settings.subjects.result(attempt.owner, attempt.job)
        stored, window = await self._broker.read(RESULTS, subject), self._settings.window
        return next((each for each in reversed(stored) if repeats(message, each, window=window)), None)


class FinalResult:
    """The one result of one submission, stored or still to be stored.

    Args:
        broker: Where to.
        subject: Of the job's results.
        submission: Its number.
        newest: The job's newest result when the attempt began, of whatever submission.
        storage: Outlasts outages.
    """

    def __init__(
        self, broker: Broker, subject: str, submission: int, newest: Stored | None, storage: Storage
    ) -> None:
        self._broker = broker
        self._subject = subject
        self._submission = submission
        self._newest = newest
        self._storage = storage

    @property
    def stored(self) -> bool:
        """Whether this submission has its result, or a later one has."""
        return self._newest is not None and _submission(self._newest) >= self._submission

    @property
    def own(self) -> Stored | None:
        """The stored result of this very submission, by whichever attempt; None where there is none."""
        newest = self._newest
        return newest if newest is not None and _submission(newest) == self._submission else None

    @property
    def first(self) -> bool:
        """Whether no submission under this job id had a result before."""
        return self._newest is None

    async def store(self, body: bytes, fields: Mapping[str, str]) -> bool:
        """Stores the result, unless this submission or a later one has one by now.

        Args:
            body: The answer.
            fields: Its headers.

        Returns:
            Whether the result that is there now is this one.

        Raises:
            PayloadTooLarge: Over the server's limit.
            BusUnavailable: NATS was away for too long.
        """
        return await self._storage.store(lambda: self._store(body, fields), subject=self._subject)

    async def _store(self, body: bytes, fields: Mapping[str, str]) -> bool:
        """Stores a result unless this submission has one, or a later one; whether the one there is this one.

        What came in between may be the result of an earlier submission with the same id, which must not keep
        this one from having its own; or this very result, whose confirmation was lost.
        """
        while await self._broker.store(self._subject, body, fields, expect=self._expected) is None:
            before = self._expected
            self._newest = await self._broker.last(RESULTS, self._subject)
            if self._newest is not None and self.stored:
                return all(self._newest.headers.get(name) == fields[name] for name in _IDENTITY)
            if self._expected == before:
                raise BusUnavailable("the newest result cannot be seen yet")
        return True

    @property
    def _expected(self) -> int:
        return 0 if self._newest is None else self._newest.sequence


def _submission(result: Stored) -> int:
    """The submission that a stored result answers."""
    return number(result.headers.get(headers.SUBMISSION))
