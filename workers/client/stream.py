"""What live and durable answers have in common: reading, waiting, cancelling, closing."""

from __future__ import annotations

import abc
import asyncio
import contextlib
import time
import weakref
from collections import deque
from collections.abc import AsyncIterator, Callable, Generator
from types import TracebackType
from typing import Any, Final, Generic, Self, TypeVar, cast

from inferbus.schemas.answers import TokenChunk, Usage
from inferbus.schemas.errors import BusUnavailable, Cancelled, InferbusError
from inferbus.schemas.headers import Status
from inferbus.workers.bus.connection.message import Message
from inferbus.workers.client.assembler import Assembler, Event, FinalStatus, Restarted
from inferbus.workers.client.choice import Message as ChoiceMessage
from inferbus.workers.client.choice import message
from inferbus.workers.client.deltas import to_answer
from inferbus.workers.client.flow import Flow
from inferbus.workers.client.mailbox import Mailbox
from inferbus.workers.client.messages import Answer, convert

E = TypeVar("E")

CLOSED: Final = None
"""Queued instead of a message when the connection is closed for good."""


class AnswerStream(abc.ABC, Generic[E]):
    """One answer as it arrives. Iterate over it once, or await it for the whole answer.

    Leaving it early (a `break`, an exception, the end of an `async with`) closes it, and so does the garbage
    collector when nothing refers to it any more.

    Attributes:
        job: The job's id.
        started: When the request was sent, by the clock of `time.monotonic`.
        first: When the first token came; None before.
        ended: When the answer ended; None before.
        replayed: Whether it began with stored chunks, so that its times say nothing about the workers.
    """

    def __init__(
        self,
        job: str,
        arrived: Mailbox,
        release: Callable[[], None],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Not to be called; see `Client`.

        Args:
            job: The job's id.
            arrived: Receives the messages of the answer.
            release: Ends the subscription that fills `arrived`. Neither may refer to this object, which could
                not be collected then.
            clock: For the times.
        """
        self.job = job
        self.started = clock()
        self.first: float | None = None
        self.ended: float | None = None
        self.replayed = False
        self._clock = clock
        self._assembler = Assembler()
        self._flow = Flow(self._assembler)
        self._arrived = arrived
        self._ready: deque[Event] = deque()
        self._cancelling = False
        self._problem: InferbusError | None = None
        self._release = release
        self._finalizer = weakref.finalize(self, _call_on_loop, asyncio.get_running_loop(), release)
        self._finalizer.atexit = False

    @property
    def final_status(self) -> FinalStatus | None:
        """How the answer ended; None before."""
        return self._assembler.final_status

    @property
    def status(self) -> Status | None:
        """`ok`, `error`, `cancelled` or `expired`; None before the end."""
        return self.final_status.status if self.final_status else None

    @property
    def worker(self) -> str | None:
        """The worker that answered; known at the end."""
        return self.final_status.worker if self.final_status else None

    @property
    def prefill_worker(self) -> str | None:
        """The prefill worker that served it, if one did; known at the end."""
        return self.final_status.prefill_worker if self.final_status else None

    @property
    def usage(self) -> Usage | None:
        """Token counts; None before the answer has reported them."""
        usage = self._assembler.delivered.usage
        return None if usage is None else convert(usage, Usage)

    @property
    def warnings(self) -> list[str]:
        """Fields of the request that were ignored, and similar."""
        return self._assembler.delivered.warnings

    async def answer(self) -> Answer:
        """Waits for the end and returns the whole answer, including what was iterated over already.

        Raises:
            InferbusError: The answer is an error; the class says which.
        """
        async for _ in self:
            pass
        if self.final_status is None:
            raise self._problem or Cancelled("the stream was closed before its end")
        if self.final_status.error is not None:
            raise self.final_status.error
        return self._assembler.whole or to_answer(self._assembler.delivered)

    async def message(self, index: int = 0) -> ChoiceMessage:
        """Waits for the end and returns what one choice says, with attributes.

        Args:
            index: The choice.

        Raises:
            InferbusError: The answer is an error; the class says which.
            ValueError: It has no such choice.
        """
        return message(await self.answer(), index=index)

    def __await__(self) -> Generator[Any, None, Answer]:
        return self.answer().__await__()

    async def __aiter__(self) -> AsyncIterator[E]:
        try:
            while self._ready or await self._filled():
                event = self._ready.popleft()
                if self.first is None and _has_tokens(event):
                    self.first = self._clock()
                yield cast(E, event)
        except InferbusError as problem:
            self._problem = problem
            raise
        finally:
            await self.aclose()

    async def aclose(self) -> None:
        """Stops reading; harmless when the answer has ended."""
        self._close()

    async def cancel(self) -> None:
        """Asks for the request to be stopped wherever it is; iterating then ends, with what was on its way.

        Raises:
            BusUnavailable: NATS did not take it.
        """
        if self.final_status is None:
            self._cancelling = True
            await self._cancel()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    def connection_lost(self) -> None:
        """Ends reading with an error: the connection is closed for good."""
        self._arrived.put(CLOSED)

    def reconnected(self) -> None:
        """The connection is back, and messages may have been lost meanwhile."""

    @abc.abstractmethod
    async def _more(self) -> None:
        """Waits for the next message, and appends the events that it makes available to `_ready`.

        At once, so that none is lost if it then fails or is cancelled.
        """

    @abc.abstractmethod
    async def _cancel(self) -> None:
        """Publishes the cancellation."""

    def _close(self) -> None:
        if self._finalizer.detach() is not None:
            self._arrived.close()
            self._release()

    async def _filled(self) -> bool:
        """Waits until `_ready` has an event; False: none comes any more."""
        while not self._ready:
            if self.final_status is not None:
                self._end(self.final_status)
                return False
            if self._problem is not None:
                raise self._problem
            if not self._finalizer.alive:
                return False
            try:
                await self._more()
            except InferbusError as problem:
                self._problem = problem  # Raised once everything before it was read.
        return True

    def _end(self, final_status: FinalStatus) -> None:
        self.ended = self.ended or self._clock()
        requested = self._cancelling and final_status.status == "cancelled"
        if final_status.error is not None and not requested:
            raise final_status.error

    async def _receive(self, timeout: float | None) -> Message | None:
        """The next message; None where there were chunks that needed no thought, which are in `_ready` now.

        Raises:
            TimeoutError: None came in time.
            BusUnavailable: The connection is closed.
        """
        waiting = self._arrived.waiting
        if not waiting and not await self._arrived.news(timeout):
            raise TimeoutError
        if self._flow.take(waiting, self._ready):
            return None
        message = waiting.popleft()
        if message is None:
            self.connection_lost()
            raise BusUnavailable("the connection to NATS is closed")
        return message


def text(event: Event, *, index: int = 0) -> str:
    """The text that a chunk adds to a choice, or that a whole answer has; empty for token ids."""
    if not isinstance(event, dict):
        return ""
    return "".join(_text(choice) for choice in event["choices"] if choice.get("index", 0) == index)


def _call_on_loop(loop: asyncio.AbstractEventLoop, release: Callable[[], None]) -> None:
    """Runs `release` on the event loop: the garbage collector may call this on any thread."""
    with contextlib.suppress(RuntimeError):  # The loop is closed, and so is the connection.
        loop.call_soon_threadsafe(release)


def _text(choice: dict[str, Any]) -> str:
    said = choice.get("delta") or choice.get("message") or choice
    return said.get("content") or said.get("text") or ""


def _has_tokens(event: Event) -> bool:
    """Whether an event has generated content, and not only a role."""
    if isinstance(event, Restarted):
        return False
    if isinstance(event, TokenChunk):
        return bool(event.token_ids)
    parts = ("content", "text", "reasoning_content", "tool_calls")
    return any((choice.get("delta") or choice).get(part) for choice in event["choices"] for part in parts)
