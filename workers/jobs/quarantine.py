"""Last attempts at jobs whose workers died: made one at a time, and counted when they begin.

All jobs that a killed worker held come back at the same time, to the same next worker. So a job that kills
its workers costs the jobs beside it as many attempts as itself. An attempt without another such job beside it
shows which one it is. The broker's delivery count includes jobs that were never started; the attempts that
began are counted here, beside the results, which are kept longer than a job's chunks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from inferbus.schemas import headers
from inferbus.workers.bus.interface import Broker
from inferbus.workers.bus.jetstream.layout import RESULTS
from inferbus.workers.jobs.attempt import Attempt
from inferbus.workers.jobs.retry import outlast_outage
from inferbus.workers.jobs.settings import JobSettings

LAST_ATTEMPTS: Final = 2
"""For one job: one may be lost because NATS was away, or to another job that kills its worker."""


class Quarantine:
    """Has room for one attempt at a time.

    Args:
        broker: Keeps the counts.
        settings: Of the worker.
        clock: Monotonic seconds.

    Attributes:
        occupied: Whether an attempt is under way in it.
    """

    def __init__(
        self, broker: Broker, settings: JobSettings, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._broker = broker
        self._subjects = settings.subjects
        self._clock = clock
        self.occupied = False

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Occupied while the block runs."""
        self.occupied = True
        try:
            yield
        finally:
            self.occupied = False

    async def begun(self, attempt: Attempt) -> int:
        """How many last attempts at a job began, those not counted that ended in order.

        Raises:
            BusUnavailable: The server did not answer.
        """
        newest = await self._broker.last(RESULTS, self._subject(attempt))
        return 0 if newest is None else int(newest.headers[headers.LAST_ATTEMPTS])

    async def count(self, attempt: Attempt, begun: int) -> None:
        """Counts one more than `begun`; to be awaited before it begins.

        Raises:
            BusUnavailable: NATS was away for too long; the count may be stored.
        """
        subject, fields = self._subject(attempt), _headers(attempt, begun + 1)
        await outlast_outage(
            lambda: self._broker.store(subject, b"", fields), subject=subject, clock=self._clock
        )

    async def uncount(self, attempt: Attempt, begun: int) -> None:
        """Sets the count back to `begun`: the attempt ended in order.

        Raises:
            BusUnavailable: It may not be stored.
        """
        await self._broker.store(self._subject(attempt), b"", _headers(attempt, begun))

    def uncount_later(self, attempt: Attempt, begun: int) -> None:
        """As `uncount`, without waiting: for a worker that has lost touch with NATS."""
        self._broker.send(self._subject(attempt), b"", _headers(attempt, begun))

    def _subject(self, attempt: Attempt) -> str:
        # Submissions under one job id may be under way at the same time: each has its own count.
        return self._subjects.attempts(attempt.owner, attempt.job, attempt.submission or 0)


def _headers(attempt: Attempt, begun: int) -> dict[str, str]:
    return {headers.SUBMISSION: str(attempt.submission), headers.LAST_ATTEMPTS: str(begun)}
