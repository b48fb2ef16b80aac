"""The client for programs without an event loop: its own runs in a thread.

    with SyncClient.connect("nats://127.0.0.1:4222") as client:
        print(client.chat("llama", [{"role": "user", "content": "Hi"}]).message().content)

Every method is that of `Client`, with the same arguments, and returns what that one returns once awaited. Any
number of threads may use one client.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Final, Generic, Self, TypeVar

from inferbus.schemas.answers import DetokenizeAnswer, EmbeddingsAnswer, TokenChunk, TokenizeAnswer, Usage
from inferbus.schemas.fleet import WorkerInfo
from inferbus.schemas.headers import Status
from inferbus.schemas.subjects import Kind
from inferbus.workers.client.choice import Message
from inferbus.workers.client.client import Client
from inferbus.workers.client.jobs import Job
from inferbus.workers.client.messages import Answer, Result
from inferbus.workers.client.stream import AnswerStream

T = TypeVar("T")
E = TypeVar("E")

_END: Final = object()


class _Loop:
    """An event loop in a thread."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="inferbus-client", daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of a coroutine; whoever is interrupted while waiting has it cancelled."""
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def close(self) -> None:
        """Ends the thread; harmless a second time."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()


class SyncStream(Generic[E]):
    """One answer as it arrives; see `AnswerStream`. Iterate over it once, or ask for `answer` or `message`.

    Attributes:
        job: The job's id.
    """

    def __init__(self, loop: _Loop, stream: AnswerStream[E]) -> None:
        self.job = stream.job
        self._loop = loop
        self._stream = stream

    @property
    def status(self) -> Status | None:
        """`ok`, `error`, `cancelled` or `expired`; None before the end."""
        return self._stream.status

    @property
    def worker(self) -> str | None:
        """The worker that answered; known at the end."""
        return self._stream.worker

    @property
    def usage(self) -> Usage | None:
        """Token counts; None before the answer has reported them."""
        return self._stream.usage

    @property
    def warnings(self) -> list[str]:
        """Fields of the request that were ignored, and similar."""
        return self._stream.warnings

    def answer(self) -> Answer:
        """Waits for the end and returns the whole answer; see `AnswerStream.answer`."""
        return self._loop.run(self._stream.answer())

    def message(self, index: int = 0) -> Message:
        """Waits for the end and returns one choice; see `AnswerStream.message`."""
        return self._loop.run(self._stream.message(index))

    def cancel(self) -> None:
        """Asks for the request to be stopped wherever it is."""
        self._loop.run(self._stream.cancel())

    def close(self) -> None:
        """Stops reading, which cancels a live request; harmless when the answer has ended."""
        self._loop.run(self._stream.aclose())

    def __iter__(self) -> Iterator[E]:
        events = self._loop.run(_begun(self._stream))
        try:
            while (event := self._loop.run(_next(events))) is not _END:
                yield event
        finally:
            self.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class SyncClient:
    """Sends requests over one connection and reads their answers. Made by `connect`."""

    def __init__(self, loop: _Loop, client: Client) -> None:
        """Not to be called; see `connect`."""
        self._loop = loop
        self._client = client

    @staticmethod
    def connect(*target: Any, **options: Any) -> SyncClient:
        """Connects; arguments as for `Client.connect`.

        Raises:
            BusUnavailable: Nothing answers, or it refuses.
            InferbusError: As `Client.connect` does.
        """
        connecting, loop = Client.connect(*target, **options), _Loop()
        try:
            return SyncClient(loop, loop.run(_awaited(connecting)))
        except BaseException:
            loop.close()
            raise

    def chat(
        self, model: str, messages: Sequence[Mapping[str, Any]], **options: Any
    ) -> SyncStream[dict[str, Any]]:
        """See `Client.chat`."""
        return self._stream(lambda: self._client.chat(model, messages, **options))

    def complete(self, model: str, prompt: str | Sequence[int], **options: Any) -> SyncStream[dict[str, Any]]:
        """See `Client.complete`."""
        return self._stream(lambda: self._client.complete(model, prompt, **options))

    def tokens(self, model: str, token_ids: Sequence[int], **options: Any) -> SyncStream[TokenChunk]:
        """See `Client.tokens`."""
        return self._stream(lambda: self._client.tokens(model, token_ids, **options))

    def embeddings(self, model: str, input: Any, **options: Any) -> EmbeddingsAnswer:
        """See `Client.embeddings`."""
        return self._loop.run(self._client.embeddings(model, input, **options))

    def tokenize(self, model: str, prompt: Any = None, **options: Any) -> TokenizeAnswer:
        """See `Client.tokenize`."""
        return self._loop.run(self._client.tokenize(model, prompt, **options))

    def detokenize(self, model: str, tokens: Any, **options: Any) -> DetokenizeAnswer:
        """See `Client.detokenize`."""
        return self._loop.run(self._client.detokenize(model, tokens, **options))

    def submit(self, kind: Kind, model: str, body: Mapping[str, Any], **options: Any) -> Job:
        """See `Client.submit`."""
        return self._loop.run(self._client.submit(kind, model, body, **options))

    def stream(self, job: Job | str, **options: Any) -> SyncStream[Any]:
        """See `Client.stream`."""
        return self._stream(lambda: self._client.stream(job, **options))

    def result(self, job: Job | str, timeout: float | None = None) -> Result:
        """See `Client.result`."""
        return self._loop.run(self._client.result(job, timeout))

    def cancel(self, job: Job | str) -> None:
        """See `Client.cancel`."""
        self._loop.run(self._client.cancel(job))

    def find(self, job_id: str, *, submission: int | None = None) -> Job:
        """See `Client.find`."""
        return self._loop.run(self._client.find(job_id, submission=submission))

    def workers(self) -> list[WorkerInfo]:
        """See `Client.workers`."""
        return self._loop.run(self._client.workers())

    def models(self) -> list[str]:
        """See `Client.models`."""
        return self._loop.run(self._client.models())

    def close(self) -> None:
        """Closes the connection and ends the thread; harmless a second time."""
        if not self._client.bus.closed.is_set():
            self._loop.run(self._client.close())
        self._loop.close()

    def _stream(self, ask: Callable[[], AnswerStream[E]]) -> SyncStream[E]:
        return SyncStream(self._loop, self._loop.run(_called(ask)))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


async def _awaited(work: Awaitable[T]) -> T:
    return await work


async def _called(ask: Callable[[], T]) -> T:
    """On the event loop, as the client's calls need it."""
    return ask()


async def _begun(stream: AnswerStream[E]) -> AsyncIterator[E]:
    return aiter(stream)


async def _next(events: AsyncIterator[E]) -> Any:
    return await anext(events, _END)
