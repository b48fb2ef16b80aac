"""Live answers. Nothing is stored: what is lost on the way cannot be read again, and is reported at once."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Mapping
from typing import Final, TypeVar

import structlog

from inferbus.schemas.errors import BusUnavailable, InferbusError
from inferbus.schemas.subjects import LIVE_OWNER
from inferbus.workers.bus.connection.bus import Bus
from inferbus.workers.bus.connection.message import NO_RESPONDERS, Callback, Message
from inferbus.workers.bus.errors import NotPermitted
from inferbus.workers.client.assembler import Event
from inferbus.workers.client.errors import AnswerLost, ConnectionLost, TimedOut, WorkerLost
from inferbus.workers.client.liveness import ASK_AFTER, ASK_EVERY, LivenessProbe
from inferbus.workers.client.messages import acknowledged_by, not_taken, parse_message
from inferbus.workers.client.stream import AnswerStream

log = structlog.get_logger()

C = TypeVar("C")

END_GRACE: Final = 2.0
"""Seconds to wait for the end mark of an answer that is complete; afterwards the mark counts as lost."""

NO_RESPONDERS_PAUSES: Final = (0.05, 0.15, 0.3)
"""Seconds before a request that nobody was there for is sent again: a full worker may be joining again."""

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
        self._retries = deque(NO_RESPONDERS_PAUSES)
        self._taker = ""
        self._reconnects = bus.reconnects

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

    async def _more(self) -> None:
        await (self._end_mark() if self._assembler.complete else self._next_chunk())
        self._request.answered = self.final_status is not None

    async def _next_chunk(self) -> None:
        message = await self._next_message()
        if message.status == NO_RESPONDERS and self._retries:
            await asyncio.sleep(self._retries.popleft())
            self._request.repeat()
            return
        self._request.forget_body()
        self._ready += self._take(message)
        if self._assembler.missing:
            raise self._lost()

    def _lost(self) -> AnswerLost:
        if self._reconnected:
            return ConnectionLost("the connection to NATS was lost during the answer; send the request again")
        return AnswerLost("part of the answer was lost on the way; send the request again")

    @property
    def _reconnected(self) -> bool:
        """Whether messages may have been lost with the connection."""
        return self._bus.reconnects != self._reconnects

    async def _end_mark(self) -> None:
        """Waits for the end mark of an answer that is complete."""
        try:
            self._ready += self._take(await self._receive(END_GRACE))
        except TimeoutError:
            self._assembler.close()

    def _take(self, message: Message) -> list[Event]:
        if (stream := acknowledged_by(message)) is not None:
            log.warning("client.request_stored", stream=stream, subject=self._request.subject)
            self._taker = f"; the NATS stream {stream} stores such requests, which is no part of inferbus"
            return []
        if message.status == NO_RESPONDERS:
            return self._assembler.take(not_taken())
        if message.forwarded:
            return []
        parsed = parse_message(message.data, message.headers)
        return [] if parsed is None else self._assembler.take(parsed)

    async def _next_message(self) -> Message:
        """The next message; a long silence checks the permission and the worker.

        While a worker says that it has the request, that is no silence.
        """
        timeout = float("inf") if self._timeout is None else self._timeout
        probe = LivenessProbe(self._bus, LIVE_OWNER, self.job)
        began = self._clock()
        next_ask, checked = began + min(ASK_AFTER, timeout / 2), False
        try:
            while True:
                now = self._clock()
                gives_up = max(began, probe.heard) + timeout
                if now >= gives_up:
                    if self._reconnected:
                        raise self._lost()
                    raise TimedOut(f"nothing came for {timeout:g} s{self._taker}")
                if now >= next_ask:
                    self._ask(probe)
                    next_ask = now + min(ASK_EVERY, timeout / 4)
                pause = min(next_ask, gives_up) - now
                try:
                    return await self._receive(pause if checked else min(pause, DENIED_AFTER))
                except TimeoutError:
                    checked = True
                    self._check_permission()
        finally:
            probe.close()

    def _ask(self, probe: LivenessProbe) -> None:
        try:
            probe.ask()
        except WorkerLost:
            if not self._reconnected:
                raise
            # Its worker may be without a connection still: the configured patience decides.
            if self._timeout is None:
                raise self._lost() from None

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
        self._body: tuple[bytes, Mapping[str, str]] | None = None

    def send(self, subject: str, data: bytes, headers: Mapping[str, str]) -> None:
        self._bus.send(subject, data, headers, reply=self._inbox.subject)
        self.subject, self._body = subject, (data, headers)

    def repeat(self) -> None:
        """Sends it again: nobody has received it."""
        if self._body is not None:
            self.send(self.subject, *self._body)

    def forget_body(self) -> None:
        """It is not sent again."""
        self._body = None

    def release(self) -> None:
        """Stops listening, and cancels the request if it is not answered."""
        self._inbox.close()
        if self.subject and not self.answered and not self._bus.closed.is_set():
            self.cancel()

    def cancel(self) -> None:
        # Not stored by this side: live requests need no JetStream, and closing must not wait.
        self._bus.send(self._bus.subjects.cancel(LIVE_OWNER, self._job), b"")
