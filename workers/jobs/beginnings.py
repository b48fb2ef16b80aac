"""How many attempts at a job began.

The broker's delivery count includes deliveries that never became an attempt: lost on the way, put back for
another owner's turn, or taken by a worker that was killed before it began. So attempts are counted where they
begin, beside the results, which are kept longer than a job's chunks. The first delivery of a job is not
counted: nearly every job has no second one, and would pay for it with a stored message.
"""

from __future__ import annotations

import msgspec
import structlog

from inferbus.schemas import headers
from inferbus.workers.bus.errors import NotPermitted
from inferbus.workers.bus.interface import Broker
from inferbus.workers.bus.jetstream.layout import RESULTS
from inferbus.workers.jobs.attempt import Attempt
from inferbus.workers.jobs.fields import number
from inferbus.workers.jobs.settings import JobSettings
from inferbus.workers.jobs.storage import Storage

log = structlog.get_logger()


class Begun(msgspec.Struct, frozen=True):
    """What was counted.

    Attributes:
        attempts: That began, those not counted that were given up in order.
        newest: Number of the newest attempt that was counted; 0: none was.
    """

    attempts: int = 0
    newest: int = 0


class Beginnings:
    """Counts the attempts at jobs.

    Args:
        broker: Keeps the counts.
        settings: Of the worker.
        storage: Outlasts outages.
    """

    def __init__(self, broker: Broker, settings: JobSettings, storage: Storage) -> None:
        self._broker = broker
        self._subjects = settings.subjects
        self._storage = storage

    async def of(self, attempt: Attempt) -> Begun:
        """What was counted for a submission.

        Raises:
            BusUnavailable: The server did not answer.
        """
        newest = await self._broker.last(RESULTS, self._subject(attempt))
        if newest is None:
            return Begun()
        return Begun(
            attempts=number(newest.headers.get(headers.BEGUN)),
            newest=number(newest.headers.get(headers.ATTEMPT)),
        )

    async def count(self, attempt: Attempt, before: int) -> None:
        """Counts one more than `before`; to be awaited before it begins.

        Raises:
            BusUnavailable: NATS was away for too long; the count may be stored.
        """
        subject, fields = self._subject(attempt), _headers(attempt, before + 1)
        await self._storage.store(lambda: self._broker.store(subject, b"", fields), subject=subject)

    async def uncount(self, attempt: Attempt, before: int) -> None:
        """Sets the count back to `before`: the attempt ended in order.

        Raises:
            BusUnavailable: It may not be stored.
        """
        await self._broker.store(self._subject(attempt), b"", _headers(attempt, before))

    def uncount_later(self, attempt: Attempt, before: int) -> None:
        """As `uncount`, without waiting: for a worker that has lost touch with NATS."""
        self._broker.send(self._subject(attempt), b"", _headers(attempt, before))

    async def forget(self, attempt: Attempt) -> None:
        """Removes the count of a submission that has ended; where that is not permitted, it expires.

        To be awaited once the result is stored, and before the job is acknowledged: an acknowledged one does
        not come again, so nobody would remove what a worker left that was killed in between.

        Raises:
            BusUnavailable: It may not be removed.
        """
        try:
            await self._broker.purge(RESULTS, self._subject(attempt))
        except NotPermitted as error:
            log.debug("attempts.left", reason=error.message, submission=attempt.submission)

    def _subject(self, attempt: Attempt) -> str:
        # Submissions under one job id may be under way at the same time: each has its own count.
        return self._subjects.attempts(attempt.owner, attempt.job, attempt.submission or 0)


def _headers(attempt: Attempt, begun: int) -> dict[str, str]:
    return {
        headers.SUBMISSION: str(attempt.submission),
        headers.ATTEMPT: str(attempt.number),
        headers.BEGUN: str(begun),
    }
