"""The last attempt at a job whose workers die: beside no other one, and with a mark that says that it began.

A worker that is killed takes with it all that it had, and all of that comes back at one time, to one worker.
So what had the bad luck to run beside a job that kills its workers has lost as many attempts as that one. An
attempt without such company tells them apart. And since deliveries count that never came to an attempt, only
the mark tells whether a job has had its last one. Readers see it as the event that the one before is over.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import msgspec

from schemas import codec, headers
from schemas.answers import Retrying
from schemas.errors import LeaseLost
from schemas.subjects import Subjects
from workers.bus.interface import Broker, Stored
from workers.bus.layout import STREAM as CHUNKS
from workers.jobs.job import Job


class LastAttempts:
    """Those of one worker.

    Args:
        broker: Keeps the marks.
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

    async def mark(self, job: Job) -> None:
        """Says that it begins; returns when that is stored.

        Raises:
            BusUnavailable: It may not be.
        """
        gone = LeaseLost("the worker that had the job is gone; its last attempt begins")
        event = Retrying(job=job.id, attempt=job.attempt - 1, retrying=gone.body())
        found = {
            headers.SUBMISSION: str(job.submission),
            headers.ATTEMPT: str(job.attempt - 1),
            headers.LAST_ATTEMPT: str(job.attempt),
        }
        subject = self._subjects.stream(job.owner, job.id)
        await self._broker.store(subject, codec.encode(event, job.content_type), found)

    async def made(self, job: Job) -> bool:
        """Whether it has begun, and was not given up in good order.

        Raises:
            BusUnavailable: The server did not answer.
        """
        begun = False
        for message in await self._broker.read(CHUNKS, self._subjects.stream(job.owner, job.id)):
            if message.headers.get(headers.SUBMISSION) != str(job.submission):
                continue
            if headers.LAST_ATTEMPT in message.headers:
                begun = True
            elif begun and given_up(message):
                begun = False
        return begun


def given_up(message: Stored) -> bool:
    """Whether a message in a job's stream says that its attempt is over, in that attempt's own words."""
    if headers.LAST_ATTEMPT in message.headers or b"retrying" not in message.data:
        return False
    decode = msgspec.json.decode if message.data[:1] == b"{" else msgspec.msgpack.decode
    try:
        decode(message.data, type=Retrying)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return False
    return True
