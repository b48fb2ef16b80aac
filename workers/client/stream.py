"""What every stream of an answer does for its user, wherever its messages come from."""

from __future__ import annotations

import abc
import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from types import TracebackType
from typing import Any, Final, Generic, Self, TypeVar, cast

import msgspec

from inferbus.schemas.answers import TokenChunk, Usage
from inferbus.schemas.errors import BusUnavailable, Cancelled, InferbusError
from inferbus.schemas.headers import Status
from inferbus.workers.bus.connection.message import Message
from inferbus.workers.client.assembler import Assembler, Event, Outcome, Restarted
from inferbus.workers.client.deltas import whole
from inferbus.workers.client.messages import Answer

E = TypeVar("E")

CLOSED: Final = None
"""In place of a message: the connection is gone for good."""


class Stream(abc.ABC, Generic[E]):
    """One answer as it arrives. Iterate over it, or await `answer`; use it once.

    Leaving it early (a `break`, an exception, the end of an `async with`) ends interest in the answer.

    Attributes:
        job: The job's id.
        started: When the request was sent, by the clock of `time.monotonic`.
        first: When the first token came; None before.
        ended: When the answer ended; None before.
        replayed: Whether it began with what was stored earlier, so that its times tell nothing.
    """

    def __init__(self, job: str, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.job = job
        self.started = clock()
        self.first: float | None = None
        self.ended: float | None = None
        self.replayed = False
        self._clock = clock
        self._assembler = Assembler()
        self._arrived: asyncio.Queue[Message | None] = asyncio.Queue()
        self._ready: deque[Event] = deque()
        self._cancelling = False
        self._left = False
        self._problem: InferbusError | None = None

    @property
    def outcome(self) -> Outcome | None:
        """How the answer ended; None before."""
        return self._assembler.outcome

    @property
    def status(self) -> Status | None:
        """How the answer ended; None before."""
        return self.outcome.status if self.outcome else None

    @property
    def worker(self) -> str | None:
        """Who answered; known at the end."""
        return self.outcome.worker if self.outcome else None

    @property
    def prefill_worker(self) -> str | None:
        """The prefill worker that served it, if one did; known at the end."""
        return self.outcome.prefill_worker if self.outcome else None

    @property
    def usage(self) -> Usage | None:
        """Tokens, once the answer has told them."""
        told = self._assembler.given.usage
        return None if told is None else msgspec.convert(told, Usage)

    @property
    def warnings(self) -> list[str]:
        """What of the request was ignored."""
        return self._assembler.given.warnings

    async def answer(self) -> Answer:
        """Waits for the end and returns the whole answer, what was iterated over already included.

        Raises:
            InferbusError: The answer is an error; the class says which.
        """
        async for _ in self:
            pass
        if self.outcome is None:
            raise self._problem or Cancelled("the stream was left before its end")
        if self.outcome.error is not None:
            raise self.outcome.error
        return whole(self._assembler.given)

    async def __aiter__(self) -> AsyncIterator[E]:
        try:
            while (event := await self._next()) is not None:
                yield cast(E, event)
        except InferbusError as problem:
            self._problem = problem
            raise
        finally:
            await self.aclose()

    async def aclose(self) -> None:
        """Ends interest in the answer; harmless when it has ended."""
        if not self._left:
            self._left = True
            await self._leave()

    async def cancel(self) -> None:
        """Asks for the request to be stopped wherever it is; iterating then ends, with what was on its way.

        Raises:
            BusUnavailable: NATS did not take it.
        """
        if self.outcome is None:
            self._cancelling = True
            await self._cancel()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    def connection_lost(self) -> None:
        """The connection is gone for good: whoever waits here is told."""
        self._arrived.put_nowait(CLOSED)

    @abc.abstractmethod
    async def _more(self) -> list[Event]:
        """Waits for something to arrive, and takes it."""

    @abc.abstractmethod
    async def _cancel(self) -> None:
        """Publishes the cancellation."""

    @abc.abstractmethod
    async def _leave(self) -> None:
        """Stops listening."""

    async def _next(self) -> Event | None:
        while not self._ready:
            if self.outcome is not None:
                self._finish(self.outcome)
                return None
            if self._problem is not None:
                raise self._problem
            if self._left:
                return None
            self._ready.extend(await self._more())
        event = self._ready.popleft()
        if self.first is None and _speaks(event):
            self.first = self._clock()
        return event

    def _finish(self, outcome: Outcome) -> None:
        self.ended = self.ended or self._clock()
        wanted = self._cancelling and outcome.status == "cancelled"
        if outcome.error is not None and not wanted:
            raise outcome.error

    async def _receive(self, timeout: float | None) -> Message:
        """The next message.

        Raises:
            TimeoutError: None came in time.
            BusUnavailable: None will come.
        """
        if self._arrived.empty():
            async with asyncio.timeout(timeout):
                message = await self._arrived.get()
        else:
            message = self._arrived.get_nowait()
        if message is None:
            self.connection_lost()
            raise BusUnavailable("the connection to NATS is closed")
        return message


def text(event: Event, *, index: int = 0) -> str:
    """What a chunk adds to the text of one choice; empty for tokens and for what is no text."""
    if not isinstance(event, dict):
        return ""
    return "".join(_text(choice) for choice in event["choices"] if choice.get("index", 0) == index)


def _text(choice: dict[str, Any]) -> str:
    delta = choice.get("delta") or choice
    return delta.get("content") or delta.get("text") or ""


def _speaks(event: Event) -> bool:
    """Whether an event holds a token, and not only a role."""
    if isinstance(event, Restarted):
        return False
    if isinstance(event, TokenChunk):
        return bool(event.token_ids)
    parts = ("content", "text", "reasoning_content", "tool_calls")
    return any((choice.get("delta") or choice).get(part) for choice in event["choices"] for part in parts)
