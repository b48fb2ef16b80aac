"""The client: one connection, one method per kind of request, and durable jobs.

    async with Client.connect("nats://127.0.0.1:4222") as client:
        async for chunk in client.chat("llama", [{"role": "user", "content": "Hi"}]):
            print(text(chunk), end="")

A live request is sent by the call itself, which raises what is wrong with it; its answer is awaited when the
stream is read.
"""

from __future__ import annotations

import asyncio
import secrets
import weakref
from collections.abc import AsyncIterator, Coroutine, Generator, Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

import structlog
from msgspec import UNSET, UnsetType

from inferbus.schemas import codec, headers
from inferbus.schemas.answers import DetokenizeAnswer, EmbeddingsAnswer, TokenChunk, TokenizeAnswer
from inferbus.schemas.errors import CallerError, InferbusError, InternalError, InvalidSubject
from inferbus.schemas.fleet import WorkerInfo
from inferbus.schemas.subjects import LIVE_OWNER, JobClass, Kind, escape
from inferbus.workers.bus.connection.bus import Bus
from inferbus.workers.bus.errors import NOT_FOUND, ApiError
from inferbus.workers.bus.fleet.registry import entry_subject, parse_entry
from inferbus.workers.bus.interface import Stored
from inferbus.workers.bus.jetstream import layout
from inferbus.workers.bus.jetstream.client import JetStream
from inferbus.workers.client.bulk import answers
from inferbus.workers.client.durable import JobStream
from inferbus.workers.client.jobs import (
    Job,
    find_job,
    message_id,
    publish_cancel,
    publish_job,
    submitted_earlier,
)
from inferbus.workers.client.live import LiveStream
from inferbus.workers.client.messages import Answer, Result
from inferbus.workers.client.models import serving
from inferbus.workers.client.requests import Deadline, checked_id, encode_body, request_body, request_headers
from inferbus.workers.client.results import Results
from inferbus.workers.client.stream import AnswerStream
from inferbus.workers.config import BusSettings
from inferbus.workers.observe import logs

if TYPE_CHECKING:
    from inferbus.workers.batch.rows import AnyRows

log = structlog.get_logger()

T = TypeVar("T")

OWNER: Final = "default"
TIMEOUT: Final = 120.0
"""Seconds of silence after which a live request is given up: long enough for a long prompt."""

CONCURRENCY: Final = 32
MAX_ATTEMPTS: Final = 10
"""Of `Client.map`: the last pauses between attempts are five seconds, so that requests wait for half a
minute."""

CLOSE_TIMEOUT: Final = 1.0
"""Seconds that `close` waits for subscriptions to end."""


class _Options(NamedTuple):
    job_id: str | None
    deadline: Deadline | None
    timeout: float | UnsetType | None
    traceparent: str | None


class Client:
    """Sends requests over one connection and reads their answers. Made by `connect`.

    Attributes:
        bus: The connection.
        owner: Owner of the jobs.
        content_type: Of requests and answers.
    """

    def __init__(
        self,
        bus: Bus,
        *,
        owner: str = OWNER,
        content_type: str = codec.JSON,
        timeout: float | None = TIMEOUT,
    ) -> None:
        """Not to be called; see `connect`."""
        if not isinstance(bus, Bus):
            raise TypeError("use Client.connect(…): `async with Client.connect(url) as client`")
        self.bus = bus
        self.owner = owner
        self.content_type = content_type
        self._timeout = timeout
        self._results = Results(bus)
        self._streams: weakref.WeakSet[AnswerStream[Any]] = weakref.WeakSet()
        self._tasks: set[asyncio.Task[None]] = set()
        self._watch = asyncio.create_task(self._end_streams())
        bus.on_change(self._connection_changed)

    @staticmethod
    def connect(
        target: str | Sequence[str] | BusSettings = BusSettings(),  # noqa: B008 - frozen
        *,
        owner: str = OWNER,
        content_type: str = codec.JSON,
        timeout: float | None = TIMEOUT,
        name: str = "inferbus client",
    ) -> Connecting:
        """Connects: `async with Client.connect(…) as client`, or `client = await Client.connect(…)`.

        Args:
            target: A URL, several, or settings.
            owner: Owner of the jobs; NATS permissions may allow only some.
            content_type: `application/json` or `application/msgpack`.
            timeout: Seconds of silence after which a live request is given up; None: never.
            name: Shown in the server's list of connections.

        Raises:
            BusUnavailable: Nothing answers, or it refuses; when awaited.
            UnsupportedContentType: Neither JSON nor MessagePack.
            InvalidSubject: No subject can carry this owner.
        """
        if escape(owner) == LIVE_OWNER:
            raise InvalidSubject(f"the owner {LIVE_OWNER!r} is reserved for live requests")
        urls = (target,) if isinstance(target, str) else target
        settings = urls if isinstance(urls, BusSettings) else BusSettings(urls=tuple(urls))
        kind = codec.content_type(content_type)

        async def connecting() -> Client:
            logs.default()
            bus = await Bus.connect(settings, name=name)
            return Client(bus, owner=owner, content_type=kind, timeout=timeout)

        return Connecting(connecting())

    def chat(
        self,
        model: str,
        messages: Sequence[Mapping[str, Any]],
        *,
        job_id: str | None = None,
        deadline: Deadline | None = None,
        timeout: float | UnsetType | None = UNSET,
        traceparent: str | None = None,
        **params: Any,
    ) -> LiveStream[dict[str, Any]]:
        """Asks for a chat completion.

        Args:
            model: The served model name.
            messages: As in OpenAI's API.
            job_id: The request's id; default: random.
            deadline: When the request expires.
            timeout: Seconds of silence after which to give up; None: never; default: the client's.
            traceparent: W3C trace context.
            params: Further fields of the body: `max_tokens=64`, `stream=False`, …

        Raises:
            InvalidRequest: A value cannot be sent as JSON or MessagePack; nothing was sent.
            PayloadTooLarge: Over the server's limit; nothing was sent.
        """
        body = {"messages": list(messages), **params}
        return self._live(model, "chat", body, _Options(job_id, deadline, timeout, traceparent))

    def complete(
        self,
        model: str,
        prompt: str | Sequence[int] | Sequence[str] | Sequence[Sequence[int]],
        *,
        job_id: str | None = None,
        deadline: Deadline | None = None,
        timeout: float | UnsetType | None = UNSET,
        traceparent: str | None = None,
        **params: Any,
    ) -> LiveStream[dict[str, Any]]:
        """Asks for a completion of a text, of token ids, or of several of either; arguments as for `chat`."""
        body = {"prompt": prompt if isinstance(prompt, str) else list(prompt), **params}
        return self._live(model, "completions", body, _Options(job_id, deadline, timeout, traceparent))

    def tokens(
        self,
        model: str,
        token_ids: Sequence[int],
        *,
        job_id: str | None = None,
        deadline: Deadline | None = None,
        timeout: float | UnsetType | None = UNSET,
        traceparent: str | None = None,
        **params: Any,
    ) -> LiveStream[TokenChunk]:
        """Asks for tokens that follow these tokens; arguments as for `chat`."""
        body = {"token_ids": list(token_ids), **params}
        return self._live(model, "tokens", body, _Options(job_id, deadline, timeout, traceparent))

    async def embeddings(
        self,
        model: str,
        input: str | Sequence[str] | Sequence[int] | Sequence[Sequence[int]],
        *,
        job_id: str | None = None,
        deadline: Deadline | None = None,
        timeout: float | UnsetType | None = UNSET,
        traceparent: str | None = None,
        **params: Any,
    ) -> EmbeddingsAnswer:
        """The embeddings of a text, of several, or of token ids; further arguments as for `chat`.

        Args:
            model: The served model name, of an embedding model.
            input: A text, several, a list of token ids, or several.
            job_id: As for `chat`, like all that follow.
            deadline: See there.
            timeout: See there.
            traceparent: See there.
            params: `encoding_format="base64"`, `dimensions=256`.

        Raises:
            InferbusError: The answer is an error.
        """
        given = input if isinstance(input, str) else list(input)
        options = _Options(job_id, deadline, timeout, traceparent)
        return await self._whole(model, "embeddings", {"input": given, **params}, options, EmbeddingsAnswer)

    async def tokenize(
        self,
        model: str,
        prompt: str | Sequence[str] | None = None,
        *,
        messages: Sequence[Mapping[str, Any]] | None = None,
        timeout: float | UnsetType | None = UNSET,
        **params: Any,
    ) -> TokenizeAnswer:
        """The tokens of a text, of several, or of the messages of a chat as its template renders them.

        Args:
            model: The served model name.
            prompt: A text, or several.
            messages: As in a chat; instead of `prompt`.
            timeout: As for `chat`.
            params: `add_special_tokens=False`; with messages also fields of a chat, such as `tools`.

        Raises:
            InferbusError: The answer is an error.
        """
        given = prompt if prompt is None or isinstance(prompt, str) else list(prompt)
        body: dict[str, Any] = {"prompt": given} if messages is None else {"messages": list(messages)}
        options = _Options(None, None, timeout, None)
        return await self._whole(model, "tokenize", body | params, options, TokenizeAnswer)

    async def detokenize(
        self,
        model: str,
        tokens: Sequence[int] | Sequence[Sequence[int]],
        *,
        timeout: float | UnsetType | None = UNSET,
        **params: Any,
    ) -> DetokenizeAnswer:
        """The text of tokens, or of several lists of them.

        Args:
            model: The served model name.
            tokens: Token ids, or several lists of them.
            timeout: As for `chat`.
            params: `skip_special_tokens=False`.

        Raises:
            InferbusError: The answer is an error.
        """
        body = {"tokens": list(tokens), **params}
        options = _Options(None, None, timeout, None)
        return await self._whole(model, "detokenize", body, options, DetokenizeAnswer)

    def request(
        self,
        kind: Kind,
        model: str,
        body: Mapping[str, Any],
        *,
        job_id: str | None = None,
        deadline: Deadline | None = None,
        timeout: float | UnsetType | None = UNSET,
        traceparent: str | None = None,
    ) -> LiveStream[Any]:
        """Sends a body as it is; the methods above build it from arguments.

        Args:
            kind: `chat`, `completions`, `tokens`, `embeddings`, `tokenize` or `detokenize`.
            model: The served model name.
            body: The request, as that kind defines it; values may be `msgspec.Raw`.
            job_id: As for `chat`, like all that follow.
            deadline: See there.
            timeout: See there.
            traceparent: See there.
        """
        return self._live(model, kind, dict(body), _Options(job_id, deadline, timeout, traceparent))

    def map(
        self,
        kind: Kind,
        model: str,
        bodies: Iterable[Mapping[str, Any]],
        *,
        concurrency: int = CONCURRENCY,
        max_attempts: int = MAX_ATTEMPTS,
        timeout: float | UnsetType | None = UNSET,
    ) -> AsyncIterator[Answer | InferbusError]:
        """Sends many live requests, a bounded number at a time, and yields their answers in order.

        A retryable error, such as that all workers are busy, is retried after a growing pause. A request that
        fails for good yields its error instead of an answer, and the others go on. Jobs that have to outlive
        this program, or may wait for long, should be submitted instead.

        Args:
            kind: `chat`, `completions`, `tokens`, `embeddings`, `tokenize` or `detokenize`.
            model: The served model name.
            bodies: The requests, as that kind defines them.
            concurrency: Requests in flight at once; about as many as the workers have slots.
            max_attempts: Attempts for one request.
            timeout: Seconds of silence after which an attempt is given up; None: never; default: the
                client's.
        """

        def send(body: Mapping[str, Any]) -> LiveStream[Any]:
            return self._live(model, kind, dict(body), _Options(None, None, timeout, None))

        return answers(bodies, send, concurrency=concurrency, max_attempts=max_attempts)

    def batch(
        self,
        rows: AnyRows,
        *,
        output: str | Path | None = None,
        model: str | None = None,
        kind: Kind = "chat",
        map: Mapping[str, Any] | None = None,
        set: Mapping[str, Any] | None = None,
        deadline: float | None = None,
        skip_invalid: bool = False,
        ordered: bool = False,
        reorder: bool = True,
    ) -> AsyncIterator[dict[str, Any]]:
        """Runs any number of requests as jobs, and yields a line for each, as OpenAI's batch files have it.

        A line has `custom_id`, and `response` with `status_code` and `body`; the error of one that failed
        stands there too. Lines come as they are done and written; see docs/batch.md.

        Args:
            rows: Lines of a batch file, or bodies of requests, which get the ids `0`, `1`, …; or the path of
                a batch file. With `map`: rows of a table, a table in memory (of pandas, Arrow, Polars), or
                the path of one.
            output: The output file. With it, an interrupted batch goes on when this is called again, and
                lines that are done already are yielded first. Without it, nothing is kept.
            model: For all requests; None: each names it.
            kind: Of rows that are bodies, or that `map` makes.
            map: Fields of the request by column of the rows: `{"prompt": "question"}`. A text with
                placeholders, `"Translate: {{question}}"`, is filled. `custom_id` may be one of them;
                otherwise it is `row-1`, `row-2`, …
            set: Fields that all requests have: `{"max_tokens": 64}`.
            deadline: Seconds that a request may take from when it is submitted; None: no limit.
            skip_invalid: Rows that cannot be run have lines with an error, and the others run.
            ordered: Yield the lines in the order of the rows, at the end.
            reorder: Rows near each other whose prompts begin alike are sent together; False: in their order.

        Raises:
            InvalidBatch: Rows cannot be run; nothing was submitted.
            InvalidRequest: The mapping makes no request, or names a column that is not there.
            BatchChanged: `output` belongs to other rows.
            BatchHeld: Another process runs it.
            OutputFailed: The output cannot be written.
        """
        from inferbus.workers.batch.rows import Rows
        from inferbus.workers.batch.template import template

        return Rows(
            self,
            rows,
            output=output,
            model=model,
            kind=kind,
            template=template(map, set, kind=kind) if map or set else None,
            deadline=deadline,
            skip_invalid=skip_invalid,
            ordered=ordered,
            reorder=reorder,
        ).lines()

    async def submit(
        self,
        kind: Kind,
        model: str,
        body: Mapping[str, Any],
        *,
        job_id: str | None = None,
        job_class: JobClass = "batch",
        deadline: Deadline | None = None,
        stream: bool = True,
        again: bool = False,
        once: bool = False,
        traceparent: str | None = None,
    ) -> Job:
        """Submits a durable job: stored when this returns, and finished exactly once from then on.

        Args:
            kind: `chat`, `completions`, `tokens`, `embeddings`, `tokenize` or `detokenize`.
            model: The served model name.
            body: The request, as that kind defines it.
            job_id: The job's id; default: random. Submitting the same request under the same id again
                within the server's window returns the job that is there, so an uncertain submission can be
                repeated.
            job_class: Workers take `interactive` jobs more often than `batch` jobs.
            deadline: When the job expires, also while queued.
            stream: Whether chunks are wanted beside the result.
            again: Submit a request that was submitted before under its id as a new submission, within that
                window as well.
            once: Beyond that window as well: return the job of this id that is queued, or whose result is
                stored. It costs two more questions to the server.
            traceparent: W3C trace context.

        Raises:
            InvalidRequest: A value cannot be sent as JSON or MessagePack; nothing was sent.
            JobIdUsed: With `once`: the stored result of this id is another request's; nothing was sent.
            PayloadTooLarge: Over the server's limit; nothing was sent.
            Overloaded: The queue is full, or this owner's part of it; try again later.
            ModelNotFound: Nobody has ever served jobs of this model; names those that are served.
            BusUnavailable: It was not accepted, or NATS did not say so in time.
        """
        job = checked_id(job_id)
        message_headers = self._headers(job, deadline, traceparent)
        subject = self.bus.subjects.job(model, job_class, self.owner, kind)
        fields = request_body(kind, body, streamed=None if stream else False)
        data = encode_body(fields, self.content_type)
        message_headers[headers.MSG_ID] = (
            secrets.token_hex(16) if again else message_id(job, subject, self.content_type, data)
        )
        if once:
            earlier = await submitted_earlier(self.bus, self.owner, job, message_headers[headers.MSG_ID])
            if earlier is not None:
                return earlier
        ack = await publish_job(self.bus, subject, data, message_headers)
        return Job(id=job, owner=self.owner, submission=ack.sequence, model=model, duplicate=ack.duplicate)

    def stream(self, job: Job | str, *, timeout: float | None = None) -> JobStream:
        """The answer to a job, from its beginning.

        Args:
            job: From `submit`, or an id: then the newest submission.
            timeout: Seconds of silence after which to give up reading; None: never.
        """
        answer = JobStream(self.bus, self.job(job), timeout=timeout, spawn=self._spawn)
        self._streams.add(answer)
        return answer

    async def result(self, job: Job | str, timeout: float | None = None) -> Result:
        """Waits for a job's result.

        Args:
            job: From `submit`, or an id: then its newest submission.
            timeout: Seconds to wait at most; None: as long as it takes.

        Raises:
            JobNotFound: There is no job of this id.
            TimedOut: It was not there in time.
            InferbusError: The result is an error; the class says which.
        """
        handle = job if isinstance(job, Job) else await self.find(job)
        result = await self._results.wait(handle, timeout)
        if result.error is not None:
            raise result.error
        return result

    async def cancel(self, job: Job | str) -> None:
        """Stops a job wherever it is, also while queued: this submission, or with an id all up to now.

        Raises:
            Overloaded: There is no room for it; the job goes on.
            BusUnavailable: The server did not take it.
        """
        await publish_cancel(self.bus, self.job(job))

    async def find(self, job_id: str, *, submission: int | None = None) -> Job:
        """The newest submission of an id, or a certain one, whether it is queued, runs or has ended.

        Reads the owner's queued jobs, as far as they are newer than a stored result.

        Raises:
            JobNotFound: No job of this id is queued, and no result of one is stored.
            BusUnavailable: The server did not answer.
        """
        return await find_job(self.bus, self.owner, checked_id(job_id), submission)

    def job(self, job: Job | str) -> Job:
        """The handle of a job that is known by its id."""
        return job if isinstance(job, Job) else Job(id=checked_id(job), owner=self.owner)

    async def workers(self) -> list[WorkerInfo]:
        """The announced workers, by model, role and id.

        Raises:
            BusUnavailable: JetStream did not answer.
        """
        announced: dict[str, WorkerInfo] = {}
        for stored in await self._announcements():
            announced.pop(stored.subject, None)
            try:
                info = parse_entry(stored)
            except CallerError:
                log.warning("client.worker_unreadable", key=stored.subject)
                continue
            if info is not None:
                announced[stored.subject] = info
        return sorted(announced.values(), key=lambda info: (info.model, info.role, info.worker))

    async def models(self) -> list[str]:
        """The models that a ready worker answers requests for."""
        return serving(await self.workers())

    async def close(self) -> None:
        """Closes the connection; answers that are still read end with an error."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=CLOSE_TIMEOUT)
        await self.bus.close()
        await self._watch
        for task in self._tasks:
            task.cancel()

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def _announcements(self) -> list[Stored]:
        try:
            return await JetStream(self.bus).read(layout.WORKERS, entry_subject(self.bus.subjects))
        except ApiError as problem:
            if problem.status != NOT_FOUND:
                raise
            return []  # No worker has ever been started.

    async def _whole(
        self, model: str, kind: Kind, body: dict[str, Any], options: _Options, struct: type[T]
    ) -> T:
        """The answer of a kind that is computed in one piece."""
        async with self._live(model, kind, body, options) as answer:
            whole = await answer.answer()
        if not isinstance(whole, struct):
            raise InternalError("an answer is of another kind than its request")
        return whole

    def _live(
        self,
        model: str,
        kind: Kind,
        body: dict[str, Any],
        options: _Options,
    ) -> LiveStream[Any]:
        job = checked_id(options.job_id)
        message_headers = self._headers(job, options.deadline, options.traceparent)
        streamed = body.get("stream") is not False
        data = encode_body(request_body(kind, body, streamed=streamed), self.content_type)
        timeout = self._timeout if isinstance(options.timeout, UnsetType) else options.timeout
        answer: LiveStream[Any] = LiveStream(self.bus, job, timeout=timeout)
        answer.send(self.bus.subjects.request(model, kind), data, message_headers)
        self._streams.add(answer)
        return answer

    def _headers(self, job: str, deadline: Deadline | None, traceparent: str | None) -> dict[str, str]:
        return request_headers(
            job, content_type=self.content_type, deadline=deadline, traceparent=traceparent
        )

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _connection_changed(self, connected: bool) -> None:
        for stream in list(self._streams) if connected else ():
            stream.reconnected()

    async def _end_streams(self) -> None:
        """Once the connection is closed for good."""
        await self.bus.closed.wait()
        for stream in list(self._streams):
            stream.connection_lost()


class Connecting:
    """A connection being made: an awaitable and an asynchronous context manager."""

    def __init__(self, work: Coroutine[Any, Any, Client]) -> None:
        self._work = work
        self._client: Client | None = None

    def __await__(self) -> Generator[Any, None, Client]:
        return self._work.__await__()

    async def __aenter__(self) -> Client:
        self._client = await self._work
        return self._client

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._client is not None:
            await self._client.close()
