"""Waiting for the final result of a durable job.

Subscribers receive the messages of a NATS stream as well, which is fast but not certain. The stored result is
therefore read too: before the first wait, and after every silence.
"""

from __future__ import annotations

import asyncio
from typing import Final

from inferbus.schemas.errors import BusUnavailable, InternalError, InvalidRequest
from inferbus.schemas.objects import parse_object
from inferbus.workers.bus.connection.bus import Bus
from inferbus.workers.bus.interface import Stored
from inferbus.workers.bus.jetstream import layout
from inferbus.workers.bus.jetstream.client import JetStream
from inferbus.workers.bus.jetstream.objects import Objects
from inferbus.workers.client.errors import TimedOut
from inferbus.workers.client.jobs import Job
from inferbus.workers.client.messages import Result, parse_result

FIRST_PAUSE: Final = 1.0
LAST_PAUSE: Final = 10.0
"""Seconds of silence after which to read what is stored; the pause doubles from the first to the last
value."""


class Results:
    """Reads the results of jobs."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus

    async def find(self, job: Job) -> Result | None:
        """The result of this submission, or None: it is not stored yet.

        Raises:
            BusUnavailable: The server did not answer.
        """
        stored = await JetStream(self._bus).last(layout.RESULTS, self._subject(job))
        if stored is None or stored.forwarded or not job.matches(stored.headers):
            return None
        return parse_result(await self._body(job, stored), stored.headers, job=job.id)

    async def _body(self, job: Job, stored: Stored) -> bytes:
        """The stored answer, which may be an object of its own."""
        try:
            apart = parse_object(stored.headers)
            return stored.data if apart is None else await Objects(self._bus).fetch(job.owner, apart)
        except InvalidRequest as problem:
            raise InternalError(f"the stored result cannot be read: {problem.message}") from None

    async def wait(self, job: Job, timeout: float | None) -> Result:
        """Waits for a job's result.

        Raises:
            TimedOut: It was not there in time.
            BusUnavailable: The connection is closed for good, or there is no such NATS stream.
        """
        arrived = asyncio.Event()
        subscription = await self._bus.subscribe(self._subject(job), lambda _: arrived.set())
        try:
            async with asyncio.timeout(timeout):
                return await self._read_until_there(job, arrived)
        except TimeoutError:
            raise TimedOut(f"no result within {timeout:g} s; the job goes on") from None
        finally:
            await subscription.unsubscribe()

    async def _read_until_there(self, job: Job, arrived: asyncio.Event) -> Result:
        pause = FIRST_PAUSE
        while True:
            arrived.clear()
            try:
                if (result := await self.find(job)) is not None:
                    return result
            except BusUnavailable:
                # Only a lasting failure ends the wait.
                if self._bus.settled or self._bus.closed.is_set():
                    raise
            try:
                async with asyncio.timeout(pause):
                    await arrived.wait()
            except TimeoutError:
                pause = min(pause * 2, LAST_PAUSE)

    def _subject(self, job: Job) -> str:
        return self._bus.subjects.result(job.owner, job.id)
