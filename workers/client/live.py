"""Live answers. Nothing is stored; what is lost on the way is kept by the worker for a while."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections import deque
from collections.abc import Mapping
from typing import Final, TypeVar

import structlog

from inferbus.schemas import headers
from inferbus.schemas.errors import BusUnavailable, InferbusError
from inferbus.schemas.subjects import LIVE_OWNER
from inferbus.workers.bus.connection.bus import Bus
from inferbus.workers.bus.connection.message import NO_RESPONDERS, Callback, Message
from inferbus.workers.bus.errors import NotPermitted
from inferbus.workers.client.assembler import Event
from inferbus.workers.client.errors import AnswerLost, ConnectionLost, TimedOut, WorkerLost
from inferbus.workers.client.liveness import ASK_AFTER, ASK_EVERY, LivenessProbe
from inferbus.workers.client.mailbox import Mailbox
from inferbus.workers.client.messages import ChunkMessage, acknowledged_by, not_taken, parse_message
from inferbus.workers.client.stream import AnswerStream

log = structlog.get_logger()

C = TypeVar("C")

END_GRACE: Final = 2.0
"""Seconds to wait for the end mark of an answer that is complete; afterwards the mark counts as lost."""

NO_RESPONDERS_PAUSES: Final = (0.05, 0.15, 0.3)
"""Seconds before a request that nobody was there for is sent again: a full worker may be joining again."""

DENIED_AFTER: Final = 1.0
"""Seconds of silence after which to check whether the server refused the request."""

UNREMARKABLE: Final = 1.0
"""Seconds of silence within an answer after which something may be wrong."""

CONNECTED_AGAIN: Final = Message("", b"")
"""Queued when the connection is back: what comes behind it may have been sent after it."""


class LiveStream(AnswerStream[C]):
    """The answer to a live request. Closing it before its end cancels the request.

    Args:
        bus: The connection.
        job: The request's id.
        timeout: Seconds of silence after which to give up; None: never.
    """

    def __init__(self, bus: Bus, job: str, *, timeout: float | None) -> None:
        arrived = Mailbox()
        self._request = _Request(bus, job, arrived.put)
        super().__init__(job, arrived, self._request.release)
        self._bus = bus
        self._timeout = timeout
        self._retries = deque(NO_RESPONDERS_PAUSES)
        self._taker = ""
        self._reconnects = bus.reconnects
        self._ask_after, self._ask_every = ASK_AFTER, ASK_EVERY
        if timeout is not None:
            self._ask_after, self._ask_every = min(ASK_AFTER, timeout / 2), min(ASK_EVERY, timeout / 4)
        self._unremarkable = min(UNREMARKABLE, self._ask_after)
        # Since when nothing came, or a message is missing.
        self._since = self._next_question = self._clock()
        self._gap = False
        # Whether messages may be missing: questions then ask for them, too.
        self._behind = False

    def send(self, subject: str, data: bytes, fields: Mapping[str, str]) -> None:
        """Sends the request.

        Raises:
            PayloadTooLarge: Over the server's limit; nothing was sent.
            BusUnavailable: The connection is closed for good.
        """
        try:
            if self._bus.closed.is_set():
                why = self._bus.failure or "by its user"
                raise BusUnavailable(f"the connection to NATS is closed: {why}")
            self._request.send(subject, data, fields)
        except InferbusError:
            self._close()
            raise

    def reconnected(self) -> None:
        """The connection is back: asks at once for what was missed, whether anybody reads now or not."""
        if self._finalizer.alive and self.final_status is None:
            self._arrived.put(CONNECTED_AGAIN)
            self._behind = True
            with contextlib.suppress(WorkerLost):
                self._request.ask(self._assembler.position)
            if self._cancelling:
                # What was written last before the connection broke may be lost.
                self._request.cancel()

    async def _more(self) -> None:
        since, waiting = self._clock(), self._arrived.waiting
        if (
            self._flow.going
            and not self._behind
            and (waiting or await self._arrived.news(self._unremarkable))
            and self._flow.take(waiting, self._ready)
        ):
            return
        if self._assembler.complete:
            await self._end_mark()
        elif (message := await self._next_message(since)) is None:
            return
        elif message.status == NO_RESPONDERS and self._retries:
            await asyncio.sleep(self._retries.popleft())
            self._request.repeat()
        else:
            self._request.forget_body()
            self._ready += self._take(message)
        self._request.answered = self.final_status is not None

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
            message = await self._receive(END_GRACE)
        except TimeoutError:
            self._assembler.close()
        else:
            self._ready += self._take(message) if message is not None else ()

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
        if parsed is None:
            return []
        events = self._assembler.take(parsed)
        if isinstance(parsed, ChunkMessage):
            self._flow.learn(message, parsed.chunk)
        return events

    async def _next_message(self, since: float) -> Message | None:
        """The next message of the answer; None where its next chunks have come.

        The worker is asked after a long silence, when a message is missing, and when the connection is back.
        While it says that it has the request, that is no silence.

        Args:
            since: When the message before it had been read.
        """
        if self._assembler.missing:
            if not self._gap:
                self._gap, self._behind, self._next_question = True, True, since
        else:
            self._since, self._gap = since, False
            if not self._behind:
                self._next_question = since + self._ask_after
        checked = False
        while True:
            pause = None
            if not self._arrived.waiting:
                # Not before: what the client has received already is not missing.
                pause = self._pause_after_question()
                pause = pause if checked else min(pause, DENIED_AFTER)
            try:
                message = await self._receive(pause)
            except TimeoutError:
                checked = True
                self._check_permission()
                continue
            if message is None:
                return None
            if message is CONNECTED_AGAIN:
                # It was asked when this was queued; an answer to an earlier question says nothing any more.
                self._behind, self._next_question = True, self._clock() + self._ask_every
            elif not self._request.answers_question(message):
                return message
            elif self._request.alive(message):
                self._since = self._clock()
                self._compare(message)

    def _pause_after_question(self) -> float:
        """Asks if it is time to; returns the seconds after which to look again.

        Raises:
            InferbusError: It is time to give up.
        """
        now, timeout = self._clock(), self._timeout
        gives_up = float("inf") if timeout is None else self._since + timeout
        if now >= gives_up:
            if self._gap or self._reconnected:
                raise self._lost()
            raise TimedOut(f"nothing came for {timeout:g} s{self._taker}")
        if now >= self._next_question:
            self._next_question = now + self._ask_every
            self._ask()
        return min(self._next_question, gives_up) - now

    def _ask(self) -> None:
        try:
            may_ask = self._request.ask(self._assembler.position if self._behind else None)
        except WorkerLost:
            if not self._gap and not self._reconnected:
                raise
            # After a reconnection its worker may be without one still: the configured patience decides.
            if self._timeout is None or not self._reconnected:
                raise self._lost() from None
        else:
            if self._gap and not may_ask:
                raise self._lost()

    def _compare(self, answer: Message) -> None:
        """Compares what has come with what the worker has sent: all of that came before its answer."""
        first = headers.number(answer.headers, headers.FROM)
        sent = headers.number(answer.headers, headers.NEXT)
        position = self._assembler.position
        if sent is None:
            # A worker that keeps nothing.
            lost = self._gap
        else:
            lost = first is not None and first > position
            if sent > position and not self._behind:
                self._behind, self._next_question = True, self._clock()
            elif sent <= position and first is not None:
                # Nothing is missing: whatever happens from now on, no earlier loss of a connection caused it.
                self._behind, self._reconnects = False, self._bus.reconnects
        if lost:
            raise self._lost()

    def _check_permission(self) -> None:
        """NATS reports a refused publish on the connection, and does not answer it."""
        if not self._bus.may_publish(self._request.subject):
            raise NotPermitted(f"not permitted to publish to {self._request.subject}")

    async def _cancel(self) -> None:
        self._request.cancel()
        await self._bus.flush()


class _Request:
    """A live request, its reply subject, and the questions about it.

    Attributes:
        subject: Where it was sent; empty before.
        answered: Whether its answer has ended, so that there is nothing to cancel.
    """

    def __init__(self, bus: Bus, job: str, callback: Callback) -> None:
        self.subject = ""
        self.answered = False
        self._bus = bus
        self._job = job
        self._callback = callback
        self._inbox = bus.inbox(callback)
        self._token = secrets.token_hex(11)
        self._probe: LivenessProbe | None = None
        self._body: tuple[bytes, Mapping[str, str]] | None = None

    def send(self, subject: str, data: bytes, fields: Mapping[str, str]) -> None:
        self._bus.send(subject, data, {**fields, headers.RESUME: self._token}, reply=self._inbox.subject)
        self.subject, self._body = subject, (data, fields)

    def repeat(self) -> None:
        """Sends it again: nobody has received it."""
        if self._body is not None:
            self.send(self.subject, *self._body)

    def forget_body(self) -> None:
        """It is not sent again."""
        self._body = None

    def ask(self, missing: int | None) -> bool:
        """Asks whether a worker has it.

        Args:
            missing: Asks also for its messages, from this number on.

        Returns:
            False: that is not permitted.

        Raises:
            WorkerLost: See `LivenessProbe.ask`.
        """
        if self._probe is None:
            self._probe = LivenessProbe(self._bus, self._job, self._token, self._callback)
        self._probe.ask(missing)
        return self._probe.permitted

    def answers_question(self, message: Message) -> bool:
        """Whether a message answers a question, rather than the request; both may have the same subject."""
        return self._probe is not None and self._probe.answered_by(message)

    def alive(self, answer: Message) -> bool:
        """Whether an answer to a question comes from a worker that has the request."""
        return self._probe is not None and self._probe.alive(answer)

    def release(self) -> None:
        """Stops listening, and cancels the request if it is not answered."""
        self._inbox.close()
        if self._probe is not None:
            self._probe.close()
        if self.subject and not self.answered and not self._bus.closed.is_set():
            self.cancel()

    def cancel(self) -> None:
        # Not stored by this side: live requests need no JetStream, and closing must not wait.
        self._bus.send(self._bus.subjects.cancel(LIVE_OWNER, self._job), b"")
