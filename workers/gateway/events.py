"""Server-sent events: a stream of chunks as OpenAI's API sends it.

    data: {"choices": …}

    : keep-alive
    data: [DONE]

The status is decided by what comes first. A failure before the first chunk is an answer of its own; one after
it is an event with `error`, and `[DONE]`. Where nothing comes for a while, a comment keeps proxies from
closing the connection. It ends in one newline: several clients take an empty line for an event
(openai/openai-python#2722).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine
from typing import Any, Final, Literal, TypeVar

import msgspec
import structlog
from starlette.types import Receive, Scope, Send

from inferbus.schemas.errors import InferbusError, InternalError
from inferbus.workers.gateway.errors import body_of, error_response
from inferbus.workers.observe import defects

log = structlog.get_logger()

T = TypeVar("T")

BUFFER_BYTES: Final = 1024 * 1024
"""What is kept for a reader that is slower than its answer, beside what the kernel and uvicorn buffer."""

STALLED_AFTER: Final = 60.0
"""Seconds for which a reader may take nothing while more is kept for it."""

KEEP_ALIVE: Final = b": keep-alive\n"
DONE: Final = b"data: [DONE]\n\n"
HEADERS: Final = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    # nginx would collect events.
    (b"x-accel-buffering", b"no"),
)


Why = Literal["left", "too_slow", "unreadable"]


class AnswerCut(Exception):
    """An answer was given up, and nothing more can be said to its caller.

    Attributes:
        why: The caller has left, or does not read; or a file cannot be read to its end.
    """

    def __init__(self, why: Why) -> None:
        super().__init__(why)
        self.why: Why = why


class Buffer:
    """Events between an answer and its reader.

    Args:
        limit: Bytes that may wait; a first event may be larger.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._waiting: list[bytes] = []
        self._size = 0
        self._news = asyncio.Event()
        self._room = asyncio.Event()
        self.failure: InferbusError | None = None
        self.ended = False

    @property
    def full(self) -> bool:
        """Whether what waits has reached the limit."""
        return self._size >= self._limit

    def put(self, event: bytes) -> None:
        """Adds an event."""
        self._waiting.append(event)
        self._size += len(event)
        self._news.set()

    def end(self, failure: InferbusError | None = None) -> None:
        """Nothing more follows; why, where that is an error."""
        self.ended, self.failure = True, failure
        self._news.set()

    async def room(self) -> None:
        """Returns when what waited was taken."""
        self._room.clear()
        if self.full:
            await self._room.wait()

    async def take(self, timeout: float) -> bytes:
        """All that waits, as one piece; empty after `timeout` seconds, and at the end."""
        if not self._waiting and not self.ended:
            self._news.clear()
            try:
                async with asyncio.timeout(timeout):
                    await self._news.wait()
            except TimeoutError:
                return b""
        taken = self._waiting[0] if len(self._waiting) == 1 else b"".join(self._waiting)
        self._waiting, self._size = [], 0
        self._room.set()
        return taken


class EventStream:
    """An ASGI response: the chunks of an answer as server-sent events.

    When the caller leaves, or the answer has ended, the iterator of chunks is closed.

    Args:
        chunks: One object of the answer each.
        headers: Of the response, beside its own.
        keep_alive: Seconds of silence after which a comment is sent.
        waits: Whether the answer can wait for a slow reader; else it is given up once the buffer is full.
        buffer: Bytes that are kept for a slow reader.
        patience: Seconds for which an answer that can wait does so.
    """

    def __init__(
        self,
        chunks: AsyncGenerator[dict[str, Any]],
        *,
        headers: dict[str, str],
        keep_alive: float,
        waits: bool = False,
        buffer: int = BUFFER_BYTES,
        patience: float = STALLED_AFTER,
    ) -> None:
        self._chunks = chunks
        self._headers = [*HEADERS, *((name.encode(), value.encode()) for name, value in headers.items())]
        self._keep_alive = keep_alive
        self._waits = waits
        self._patience = patience
        self._buffer = Buffer(buffer)
        self._too_slow = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends the answer.

        Raises:
            AnswerCut: The caller has left, or does not read.
        """
        writing = asyncio.create_task(self._write(scope, receive, send))
        reading = asyncio.create_task(self._read(writing.cancel))
        leaving = asyncio.create_task(_left(receive))
        tasks = (writing, reading, leaving)
        try:
            await asyncio.wait({writing, leaving}, return_when=asyncio.FIRST_COMPLETED)
            left = not writing.done()
        finally:
            for task in tasks:
                task.cancel()
            written, _, _ = await asyncio.gather(*tasks, return_exceptions=True)
        if left or self._too_slow:
            raise AnswerCut("left" if left else "too_slow")
        if isinstance(written, Exception):
            raise written

    async def _read(self, give_up: Callable[[], Any]) -> None:
        """Fills the buffer."""
        try:
            async for chunk in self._chunks:
                if self._buffer.full and not await self._room():
                    # Whoever takes nothing takes no error either.
                    self._too_slow = True
                    give_up()
                    return
                self._buffer.put(_event(chunk))
        except InferbusError as error:
            self._buffer.end(error)
        except Exception:  # a supervision point: the caller has to be told that nothing follows
            defects.exception("gateway.defect")
            self._buffer.end(InternalError("the answer ended with a defect of the gateway"))
        else:
            self._buffer.end()
        finally:
            await self._chunks.aclose()

    async def _room(self) -> bool:
        """Waits until the buffer has room, where the answer can wait; whether it has."""
        try:
            async with asyncio.timeout(self._patience if self._waits else 0):
                await self._buffer.room()
        except TimeoutError:
            return False
        return True

    async def _write(self, scope: Scope, receive: Receive, send: Send) -> None:
        buffer = self._buffer
        data = await buffer.take(self._keep_alive)
        if not data and buffer.failure is not None:
            await error_response(buffer.failure)(scope, receive, send)
            return
        await send({"type": "http.response.start", "status": 200, "headers": self._headers})
        while data or not buffer.ended:
            await send({"type": "http.response.body", "body": data or KEEP_ALIVE, "more_body": True})
            data = await buffer.take(self._keep_alive)
        last = DONE if buffer.failure is None else _event(body_of(buffer.failure)) + DONE
        await send({"type": "http.response.body", "body": last})


async def unless_left(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of work for a caller.

    Raises:
        AnswerCut: The caller has left; the work was cancelled.
    """
    working, leaving = asyncio.ensure_future(work), asyncio.create_task(_left(receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise AnswerCut("left")
    finally:
        working.cancel()
        leaving.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _left(receive: Receive) -> None:
    """Returns when the caller has left; its request was read."""
    while (await receive())["type"] != "http.disconnect":
        pass


def _event(body: Any) -> bytes:
    return b"data: %b\n\n" % msgspec.json.encode(body)
