"""Live answers: nothing is stored, so what is lost on the way is lost, and the user is told at once."""

from __future__ import annotations

from typing import Final, TypeVar

from inferbus.schemas.errors import InferbusError
from inferbus.schemas.subjects import LIVE_OWNER
from inferbus.workers.bus.connection.bus import Bus
from inferbus.workers.bus.connection.message import Message
from inferbus.workers.bus.errors import NotPermitted
from inferbus.workers.client.alive import ASK_AFTER, ASK_EVERY, Question
from inferbus.workers.client.assembler import Event
from inferbus.workers.client.errors import AnswerLost, TimedOut
from inferbus.workers.client.messages import read
from inferbus.workers.client.stream import Stream

C = TypeVar("C")

END_GRACE: Final = 2.0
"""Seconds that the end mark of a complete answer may take; it was lost then, and nothing else."""

DENIED_AFTER: Final = 1.0
"""Seconds of silence after which to look whether the server refused the request."""


class LiveStream(Stream[C]):
    """The answer to a live request. Leaving it early cancels the request."""

    def __init__(self, bus: Bus, job: str, *, timeout: float | None) -> None:
        super().__init__(job)
        self._bus = bus
        self._timeout = timeout
        self._subject = ""
        # The queue's method, not one of this object: a stream that nobody holds any more must go.
        self._inbox = bus.inbox(self._arrived.put_nowait)

    def send(self, subject: str, data: bytes, headers: dict[str, str]) -> None:
        """Sends the request.

        Raises:
            PayloadTooLarge: Over the server's limit; nothing was sent.
        """
        self._subject = subject
        try:
            self._bus.send(subject, data, headers, reply=self._inbox.subject)
        except InferbusError:
            self._left = True
            self._inbox.close()
            raise

    def __del__(self) -> None:
        # Dropped without a word, before or while it was iterated over.
        if not getattr(self, "_left", True):
            self._left = True
            self._abandon()

    async def _more(self) -> list[Event]:
        if self._assembler.complete:
            return await self._last()
        found = await self._patiently()
        message = read(found.data, found.headers)
        events = [] if message is None else self._assembler.take(message)
        if self._assembler.missing:
            raise AnswerLost("part of the answer was lost on the way; send the request again")
        return events

    async def _last(self) -> list[Event]:
        """Waits for the end mark of an answer that has nothing else to come."""
        try:
            found = await self._receive(END_GRACE)
        except TimeoutError:
            self._assembler.close()
            return []
        message = read(found.data, found.headers)
        return [] if message is None else self._assembler.take(message)

    async def _patiently(self) -> Message:
        """The next message, as long as there may be somebody to send one."""
        question: Question | None = None
        waited, timeout = 0.0, float("inf") if self._timeout is None else self._timeout
        try:
            while waited < timeout:
                pause = DENIED_AFTER if not waited else ASK_EVERY if question else ASK_AFTER - waited
                pause = min(pause, timeout - waited)
                try:
                    return await self._receive(pause)
                except TimeoutError:
                    self._check_permission()
                waited += pause
                if waited >= ASK_AFTER:
                    question = question or Question(self._bus, self.job)
                    question.ask()
            raise TimedOut(f"nothing came for {timeout:g} s")
        finally:
            if question is not None:
                question.close()

    def _check_permission(self) -> None:
        """NATS reports a refused publish on the connection, and does not answer it."""
        if not self._bus.may_publish(self._subject):
            raise NotPermitted(f"not permitted to publish to {self._subject}")

    async def _cancel(self) -> None:
        self._send_cancel()
        await self._bus.flush()

    async def _leave(self) -> None:
        self._abandon()

    def _abandon(self) -> None:
        self._inbox.close()
        if self.outcome is None and self._subject and not self._bus.closed.is_set():
            self._send_cancel()

    def _send_cancel(self) -> None:
        """By `send`, not by `store`: live requests need no JetStream, and leaving must not wait."""
        self._bus.send(self._bus.subjects.cancel(LIVE_OWNER, self.job), b"")
