"""Last attempts at jobs whose workers die: beside no other such one, and counted where they begin.

A worker that is killed takes with it all that it had, and all of that comes back at one time, to one worker.
So what had the bad luck to run beside a job that kills its workers has lost as many attempts as that one. An
attempt without such company tells them apart. And since deliveries count that never came to an attempt, those
that began are counted: stored beside the results, which outlive the job.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from inferbus.schemas import codec, headers
from inferbus.schemas.answers import Retrying
from inferbus.schemas.errors import CallerError
from inferbus.schemas.subjects import Subjects
from inferbus.workers.bus.interface import Broker, Stored
from inferbus.workers.bus.jetstream.layout import RESULTS
from inferbus.workers.jobs.job import Job

LAST_ATTEMPTS: Final = 2
"""So many for a job: one may be lost to NATS being away at the wrong moment, or to another killer."""


class LastAttempts:
    """Those of one worker.

    Args:
        broker: Keeps the count.
        subjects: Of this bus.

    Attributes:
        running: Whether there is one; no other may begin then.
    """

    def __init__(self, broker: Broker, subjects: Subjects) -> None:
        self._broker = broker
        self._subjects = subjects
        self.running = False

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Around one."""
        self.running = True
        try:
            yield
        finally:
            self.running = False

    async def begun(self, job: Job) -> int:
        """How many began and were not given up in good order.

        Raises:
            BusUnavailable: The server did not answer.
        """
        newest = await self._broker.last(RESULTS, self._subject(job))
        if newest is None or newest.headers.get(headers.SUBMISSION) != str(job.submission):
            return 0
        return int(newest.headers[headers.LAST_ATTEMPTS])

    async def count(self, job: Job, begun: int) -> None:
        """Stores how many began; to be awaited before the next one does.

        Raises:
            BusUnavailable: It may not be stored.
        """
        await self._broker.store(self._subject(job), b"", _headers(job, begun))

    def take_back(self, job: Job, begun: int) -> None:
        """As `count`, by a worker that has lost touch, so that nothing can be awaited."""
        self._broker.send(self._subject(job), b"", _headers(job, begun))

    def _subject(self, job: Job) -> str:
        return self._subjects.attempts(job.owner, job.id)


def _headers(job: Job, begun: int) -> dict[str, str]:
    return {headers.SUBMISSION: str(job.submission), headers.LAST_ATTEMPTS: str(begun)}


def given_up(message: Stored) -> bool:
    """Whether a message in a job's stream says that its attempt is over, and another will follow."""
    if b"retrying" not in message.data:
        return False
    try:
        codec.decode_any(message.data, Retrying)
    except CallerError:
        return False
    return True
