"""Waiting for the one final result of a durable job.

A message of a stream reaches plain subscribers as well. That is fast but not certain, so what is stored is
looked at as well: before the first wait, and after every silence.
"""

from __future__ import annotations

import asyncio
from typing import Final

from inferbus.schemas.errors import BusUnavailable
from inferbus.workers.bus.connection.bus import Bus
from inferbus.workers.bus.jetstream import layout
from inferbus.workers.bus.jetstream.client import JetStream
from inferbus.workers.client.errors import TimedOut
from inferbus.workers.client.jobs import Job
from inferbus.workers.client.messages import Result, read_result

FIRST_LOOK: Final = 1.0
LAST_LOOK: Final = 10.0
"""Seconds of silence after which to look at what is stored; doubled up to the latter."""


class Results:
    """Finds results."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus

    def subject(self, job: Job) -> str:
        """Where a job's result is stored."""
        return self._bus.subjects.result(job.owner, job.id)

    async def find(self, job: Job) -> Result | None:
        """A job's result, if it is there; that of an earlier submission under the same id is not.

        Raises:
            BusUnavailable: The server did not answer.
        """
        stored = await JetStream(self._bus).last(layout.RESULTS, self.subject(job))
        if stored is None or not job.answered_by(stored.headers):
            return None
        return read_result(stored.data, stored.headers)

    async def wait(self, job: Job, timeout: float | None) -> Result:
        """Waits for a job's result.

        Raises:
            TimedOut: It was not there in time.
            BusUnavailable: The connection is gone for good, or there is no such stream.
        """
        arrived = asyncio.Event()
        subscription = await self._bus.subscribe(self.subject(job), lambda _: arrived.set())
        try:
            async with asyncio.timeout(timeout):
                return await self._look(job, arrived)
        except TimeoutError:
            raise TimedOut(f"no result within {timeout:g} s; the job goes on") from None
        finally:
            await subscription.unsubscribe()

    async def _look(self, job: Job, arrived: asyncio.Event) -> Result:
        pause = FIRST_LOOK
        while True:
            arrived.clear()
            try:
                if (result := await self.find(job)) is not None:
                    return result
            except BusUnavailable:
                # Away for now, or for good? Only the latter ends a wait.
                if self._bus.settled or self._bus.closed.is_set():
                    raise
            try:
                async with asyncio.timeout(pause):
                    await arrived.wait()
            except TimeoutError:
                pause = min(pause * 2, LAST_LOOK)
