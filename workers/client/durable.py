"""The answer to a durable job: its chunks as they arrive, and as they are stored.

A reader subscribes, which is fast, and reads the stored chunks only where that is not enough: for those sent
before the subscription, for those lost on the way, and after every silence. Where the chunks have expired,
the final result takes their place.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec
import structlog

from inferbus.schemas import headers
from inferbus.schemas.errors import BusUnavailable, InternalError
from inferbus.workers.bus.connection.bus import Bus
from inferbus.workers.bus.connection.message import Callback, Message
from inferbus.workers.bus.connection.subscription import Subscription
from inferbus.workers.bus.errors import NotPermitted
from inferbus.workers.bus.interface import Stored
from inferbus.workers.client import reads
from inferbus.workers.client.assembler import Event, Restarted
from inferbus.workers.client.errors import TimedOut
from inferbus.workers.client.jobs import Job, find_job, publish_cancel
from inferbus.workers.client.liveness import ASK_EVERY
from inferbus.workers.client.mailbox import Mailbox
from inferbus.workers.client.messages import AnswerMessage, Chunk, ChunkMessage, parse_message, submission_of
from inferbus.workers.client.results import FIRST_PAUSE, LAST_PAUSE, Results
from inferbus.workers.client.stream import AnswerStream

log = structlog.get_logger()

Spawn = Callable[[Coroutine[Any, Any, None]], None]


class JobStream(AnswerStream[Chunk | Restarted]):
    """The answer to a durable job, from its beginning, whenever it is read.

    Closing it does not stop the job; `cancel` does.

    Args:
        bus: The connection.
        job: Which job.
        timeout: Seconds of silence after which to give up reading, unless a worker works on it; None: never.
        spawn: Runs a coroutine in the background.
        clock: For the times and pauses.

    Attributes:
        ignored: Messages on the job's subject that are no part of this submission's answer.
    """

    def __init__(
        self,
        bus: Bus,
        job: Job,
        *,
        timeout: float | None,
        spawn: Spawn,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        arrived = Mailbox()
        self._chunks = _ChunkSubscription(bus, bus.subjects.stream(job.owner, job.id), arrived.put, spawn)
        super().__init__(job.id, arrived, self._chunks.release, clock=clock)
        self._bus = bus
        self._job = job
        self._timeout = timeout
        self._results = Results(bus)
        self.ignored = 0
        self._pause = FIRST_PAUSE
        self._next_read = self._last_news = self.started
        self._next_chunk, self._reconnects = 1, bus.reconnects

    async def _more(self) -> None:
        if not self._chunks.active:
            if self._job.submission is None:
                self._job = await find_job(self._bus, self._job.owner, self._job.id)
            await self._chunks.start()
            await self._read_stored(first=True)
            self.replayed = bool(self._ready)
            return
        wait = self._pause
        if self._incomplete:
            wait = max(self._next_read - self._clock(), 0.0)
        try:
            message = await self._receive(wait)
        except TimeoutError:
            await self._read_stored()
            return
        if message is None:
            self._last_news = self._clock()
        else:
            self._ready += self._take(message)
        if self._incomplete and self._clock() >= self._next_read:
            await self._read_stored()

    @property
    def _incomplete(self) -> bool:
        """Whether something did not arrive that must be stored by now."""
        return self._assembler.missing or self._assembler.older_attempt_ended

    def _take(self, message: Message | Stored) -> list[Event]:
        """Takes a message of this job's submission; anybody may have had others sent to its subject."""
        parsed = self._parsed(message)
        if parsed is None:
            return []
        self._last_news = self._clock()
        events = self._assembler.take(parsed)
        if isinstance(parsed, ChunkMessage):
            self._flow.learn(message, parsed.chunk)
        return events

    def _parsed(self, message: Message | Stored) -> AnswerMessage | None:
        submission = submission_of(message.headers)
        if message.forwarded or submission is None or self._job.submission not in (None, submission):
            self._pass_over(message)
            return None
        try:
            parsed = parse_message(message.data, message.headers, job=self._job.id)
        except InternalError:
            self._pass_over(message)
            return None
        if self._job.submission is None:
            self._job = msgspec.structs.replace(self._job, submission=submission)
        return parsed

    def _pass_over(self, message: Message | Stored) -> None:
        self.ignored += 1
        log.debug("client.message_ignored", subject=message.subject, ignored=self.ignored)

    async def _read_stored(self, *, first: bool = False) -> None:
        """Reads the stored chunks and the result; the pauses double while nothing is new."""
        last_news, ready = self._last_news, len(self._ready)
        try:
            await self._take_stored()
        except BusUnavailable as problem:
            # Only a lasting failure ends the stream.
            lasting = first and self._bus.settled
            if lasting or self._bus.closed.is_set() or isinstance(problem, NotPermitted):
                raise
        new = len(self._ready) > ready
        if not new:
            self._last_news = last_news
        self._pause = FIRST_PAUSE if new else min(self._pause * 2, LAST_PAUSE)
        now = self._clock()
        self._next_read = now + self._pause
        if self.final_status is None and self._timeout is not None and now - self._last_news > self._timeout:
            if not await self._worked_on():
                raise TimedOut(f"nothing came for {self._timeout:g} s; the job goes on")
            self._last_news = now

    async def _worked_on(self) -> bool:
        """Whether a worker says that it has the job."""
        try:
            subject = self._bus.subjects.alive(self._job.owner, self._job.id)
            answer = await self._bus.request(subject, timeout=ASK_EVERY)
        except BusUnavailable:
            return False
        return headers.WORKER in answer.headers

    async def _take_stored(self) -> None:
        chunks = await self._stored_chunks()
        if self._job.submission is None:
            known = (submission_of(stored.headers) or 0 for stored in chunks if not stored.forwarded)
            newest = max(known, default=0)
            self._job = msgspec.structs.replace(self._job, submission=newest or None)
        for stored in chunks:
            self._ready += self._take(stored)
        if self.final_status is None and (result := await self._results.find(self._job)) is not None:
            self._ready += self._assembler.finish(result)

    async def _stored_chunks(self) -> list[Message | Stored]:
        """The stored chunks that were not read yet."""
        if self._reconnects != self._bus.reconnects:
            # A stream in memory begins anew with its server.
            self._reconnects, self._next_chunk = self._bus.reconnects, 1
        try:
            page = await reads.chunks(self._bus, self._job.owner, self._job.id, self._next_chunk)
        except reads.Unreadable:
            return []  # Until a worker answers; the result is read all the same.
        self._next_chunk = page.next
        return page.messages

    async def _cancel(self) -> None:
        await publish_cancel(self._bus, self._job)


class _ChunkSubscription:
    """A subscription to a job's chunks, once it is started."""

    def __init__(self, bus: Bus, subject: str, callback: Callback, spawn: Spawn) -> None:
        self.subject = subject
        self._bus = bus
        self._callback = callback
        self._spawn = spawn
        self._subscription: Subscription | None = None

    @property
    def active(self) -> bool:
        return self._subscription is not None

    async def start(self) -> None:
        self._subscription = await self._bus.subscribe(self.subject, self._callback)

    def release(self) -> None:
        """Unsubscribes in the background: that waits for messages on their way."""
        subscription, self._subscription = self._subscription, None
        if subscription is not None and not self._bus.closed.is_set():
            self._spawn(subscription.unsubscribe())
