"""Live answers. Nothing is stored: what is lost on the way cannot be read again, and is reported at once."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Final, TypeVar

from inferbus.schemas.errors import BusUnavailable, InferbusError
from inferbus.schemas.subjects import LIVE_OWNER
from inferbus.workers.bus.connection.bus import Bus
from inferbus.workers.bus.connection.message import Callback, Message
from inferbus.workers.bus.errors import NotPermitted
from inferbus.workers.client.assembler import Event
from inferbus.workers.client.errors import AnswerLost, TimedOut
from inferbus.workers.client.liveness import ASK_AFTER, ASK_EVERY, LivenessProbe
from inferbus.workers.client.messages import parse_message
from inferbus.workers.client.stream import AnswerStream

C = TypeVar("C")

END_GRACE: Final = 2.0
"""Seconds to wait for the end mark of an answer that is complete; afterwards the mark counts as lost."""

DENIED_AFTER: Final = 1.0
"""Seconds of silence after which to check whether the server refused the request."""


class LiveStream(AnswerStream[C]):
    """The answer to a live request. Closing it before its end cancels the request.

    Args:
        bus: The connection.
        job: The request's id.
        timeout: Seconds of silence after which to give up; None: never.
    """

    def __init__(self, bus: Bus, job: str, *, timeout: float | None) -> None:
        arrived: asyncio.Queue[Message | None] = asyncio.Queue()
        self._request = _Request(bus, job, arrived.put_nowait)
        super().__init__(job, arrived, self._request.release)
        self._bus = bus
        self._timeout = timeout

    def send(self, subject: str, data: bytes, headers: Mapping[str, str]) -> None:
        """Sends the request.

        Raises:
            PayloadTooLarge: Over the server's limit; nothing was sent.
            BusUnavailable: The connection is closed for good.
        """
        try:
            if self._bus.closed.is_set():
                why = self._bus.failure or "by its user"
                raise BusUnavailable(f"the connection to NATS is closed: {why}")
            self._request.send(subject, data, headers)
        except InferbusError:
            self._close()
            raise

    async def _more(self) -> list[Event]:
        events = await (self._end_mark() if self._assembler.complete else self._next_chunk())
        self._request.answered = self.final_status is not None
        return events

    async def _next_chunk(self) -> list[Event]:
        events = self._take(await self._next_message())
        if self._assembler.missing:
            raise AnswerLost("part of the answer was lost on the way; send the request again")
        return events

    async def _end_mark(self) -> list[Event]:
        """Waits for the end mark of an answer that is complete."""
        try:
            return self._take(await self._receive(END_GRACE))
        except TimeoutError:
            self._assembler.close()
            return []

    def _take(self, message: Message) -> list[Event]:
        parsed = parse_message(message.data, message.headers, status=message.status)
        return [] if parsed is None else self._assembler.take(parsed)

    async def _next_message(self) -> Message:
        """The next message; a long silence checks the permission and the worker."""
        probe: LivenessProbe | None = None
        waited, timeout = 0.0, float("inf") if self._timeout is None else self._timeout
        try:
            while waited < timeout:
                pause = DENIED_AFTER if not waited else ASK_EVERY if probe else ASK_AFTER - waited
                pause = min(pause, timeout - waited)
                try:
                    return await self._receive(pause)
                except TimeoutError:
                    self._check_permission()
                waited += pause
                if waited >= ASK_AFTER:
                    probe = probe or LivenessProbe(self._bus, self.job)
                    probe.ask()
            raise TimedOut(f"nothing came for {timeout:g} s")
        finally:
            if probe is not None:
                probe.close()

    def _check_permission(self) -> None:
        """NATS reports a refused publish on the connection, and does not answer it."""
        if not self._bus.may_publish(self._request.subject):
            raise NotPermitted(f"not permitted to publish to {self._request.subject}")

    async def _cancel(self) -> None:
        self._request.cancel()
        await self._bus.flush()


class _Request:
    """A live request and its reply subject.

    Attributes:
        subject: Where it was sent; empty before.
        answered: Whether its answer has ended, so that there is nothing to cancel.
    """

    def __init__(self, bus: Bus, job: str, callback: Callback) -> None:
        self.subject = ""
        self.answered = False
        self._bus = bus
        self._job = job
        self._inbox = bus.inbox(callback)

    def send(self, subject: str, data: bytes, headers: Mapping[str, str]) -> None:
        self._bus.send(subject, data, headers, reply=self._inbox.subject)
        self.subject = subject

    def release(self) -> None:
        """Stops listening, and cancels the request if it is not answered."""
        self._inbox.close()
        if self.subject and not self.answered and not self._bus.closed.is_set():
            self.cancel()

    def cancel(self) -> None:
        # Not stored by this side: live requests need no JetStream, and closing must not wait.
        self._bus.send(self._bus.subjects.cancel(LIVE_OWNER, self._job), b"")
