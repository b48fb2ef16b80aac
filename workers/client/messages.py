"""Parses the messages of an answer: body and headers into structs.

Content type and kind follow from the bytes: a JSON object starts with `{`, which no MessagePack map does, and
the shapes of the contract exclude each other. So an answer can be read with nothing but a job's id.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final, TypeVar, get_args

import msgspec

from inferbus.schemas import codec, headers
from inferbus.schemas.answers import (
    ComputedAnswer,
    DetokenizeAnswer,
    EmbeddingsAnswer,
    TokenAnswer,
    TokenChunk,
    TokenizeAnswer,
    Usage,
)
from inferbus.schemas.errors import (
    CallerError,
    Cancelled,
    DeadlineExceeded,
    ErrorBody,
    InferbusError,
    InternalError,
    NoWorker,
    Overloaded,
    from_body,
)
from inferbus.schemas.headers import Continuation, Status
from inferbus.workers.bus.connection.message import Message

T = TypeVar("T")

Chunk = dict[str, Any] | TokenChunk
"""One chunk: OpenAI's object for `chat` and `completions`, a struct for `tokens`."""

Answer = dict[str, Any] | TokenAnswer | ComputedAnswer
"""A whole answer: OpenAI's object for `chat` and `completions`, a struct for the other kinds."""

_COMPUTED: Final[dict[str, type[ComputedAnswer]]] = {
    "data": EmbeddingsAnswer,
    "tokens": TokenizeAnswer,
    "text": DetokenizeAnswer,
}
"""Answers of computed kinds, by a field that only they have at their top."""

HINT: Final = "a durable job waits until a worker is free"
"""What to do where no worker takes a live request."""

_STATUSES: Final[dict[str, Status]] = {status: status for status in get_args(Status)}


class ChunkMessage(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A chunk and its position.

    Attributes:
        attempt: From 1.
        seq: From 0 within the attempt.
        chunk: The content.
        continues: On the first chunk of an attempt that continues an older one: which, and after how many
            chunks.
        worker: On the first chunk of a durable job's attempt: the worker that sent it.
    """

    attempt: int
    seq: int
    chunk: Chunk
    continues: Continuation | None = None
    worker: str | None = None


class WholeMessage(msgspec.Struct, frozen=True, kw_only=True):
    """An answer in one piece.

    Attributes:
        attempt: From 1.
        answer: The content.
        usage: Whether chunks of it were to report the usage.
    """

    attempt: int
    answer: Answer
    usage: bool = True


class ErrorMessage(msgspec.Struct, frozen=True, kw_only=True):
    """An attempt's error, which is its answer. No end mark follows a `final` one."""

    attempt: int
    error: InferbusError
    final: bool = False


class EndMark(msgspec.Struct, frozen=True, kw_only=True):
    """The end mark.

    Attributes:
        attempt: The attempt that has ended.
        status: How it ended.
        messages: Number of messages that the attempt sent before.
        worker: The worker that answered.
        prefill_worker: The prefill worker that served it, if one did.
    """

    attempt: int
    status: Status
    messages: int
    worker: str | None = None
    prefill_worker: str | None = None


class _Call(msgspec.Struct):
    """A tool call, or the next part of one."""

    index: int = 0
    function: _Function | None = None


class _Function(msgspec.Struct):
    name: str | None = None
    arguments: str | None = None


class _Content(msgspec.Struct):
    """A message, or the next part of one."""

    role: str | None = None
    content: str | None = None
    text: str | None = None
    reasoning_content: str | None = None
    refusal: str | None = None
    tool_calls: list[_Call] | None = None


class _Choice(_Content):
    index: int = 0
    delta: _Content | None = None
    message: _Content | None = None
    finish_reason: str | None = None
    logprobs: dict[str, Any] | None = None


class _Acknowledgement(msgspec.Struct):
    """JetStream's, of a stored message."""

    stream: str
    seq: int


class TextHead(msgspec.Struct, kw_only=True):
    """What readers rely on in an object of OpenAI's, whole or a chunk, beside its counts."""

    choices: list[_Choice]
    object: str | None = None


class _Shape(TextHead):
    """With its counts."""

    usage: Usage | None = None
    warnings: list[str] | None = None


AnswerMessage = ChunkMessage | WholeMessage | ErrorMessage | EndMark


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """The one final result of a durable job: an answer, or an error.

    Attributes:
        attempt: That ended it.
        status: How.
        submission: That it answers.
        worker: That answered.
        prefill_worker: That computed the prompt, if another one did.
        usage: Whether the job's chunks were to report the usage; the answer always has it.
        answer: The answer.
        error: Or the error.
    """

    attempt: int
    status: Status
    submission: int | None
    worker: str | None
    prefill_worker: str | None
    usage: bool = True
    answer: Answer | None = None
    error: InferbusError | None = None


def parse_chunk(data: bytes) -> Chunk:
    """The content of a chunk that was read before.

    Raises:
        InternalError: The body is not of the contract.
    """
    return _chunk(_fields(data))


def parse_message(
    data: bytes, message_headers: Mapping[str, str] | None, *, job: str | None = None
) -> AnswerMessage | None:
    """The message, or None for one without content, such as the announcement of a retry.

    Args:
        data: Its body.
        message_headers: Its headers.
        job: Messages that name no job or another one are passed over; None: the reply subject, which nobody
            else knows, says enough.

    Raises:
        InternalError: The body is not of the contract.
    """
    values = message_headers or {}
    if not data:
        return None if job not in (None, values.get(headers.JOB_ID, job)) else _end(values)
    fields = _fields(data)
    if job is not None and fields.get("job") != job:
        return None
    attempt = fields.get("attempt")
    if type(attempt) is not int:
        attempt = headers.number(values, headers.ATTEMPT) or 1
    if attempt < 1:
        raise InternalError("an answer is not of the contract: its attempt")
    if isinstance(fields.get("error"), dict):
        return ErrorMessage(attempt=attempt, error=_error(fields["error"]))
    if type(fields.get("seq")) is int:
        return ChunkMessage(
            attempt=attempt,
            seq=fields["seq"],
            chunk=_chunk(fields),
            continues=headers.parse_continues(values),
            worker=values.get(headers.WORKER),
        )
    if "choices" in fields:
        # Token answers have no `object`, which OpenAI's always have.
        answer = _checked(fields) if "object" in fields else convert(fields, TokenAnswer)
        return WholeMessage(attempt=attempt, answer=answer, usage=headers.USAGE not in values)
    if (kind := next((kind for name, kind in _COMPUTED.items() if name in fields), None)) is not None:
        return WholeMessage(attempt=attempt, answer=convert(fields, kind))
    return None


@contextmanager
def of_the_contract() -> Iterator[None]:
    """For code that works with what other programs have sent: what does not fit is one clear error.

    Raises:
        InternalError: Fields have other types than their names say.
    """
    try:
        yield
    except (TypeError, KeyError, AttributeError, RecursionError, msgspec.MsgspecError) as problem:
        raise InternalError(f"an answer is not of the contract: {type(problem).__name__}") from problem


def parse_result(data: bytes, message_headers: Mapping[str, str] | None, *, job: str | None = None) -> Result:
    """The stored result of a durable job; arguments as for `parse_message`.

    Raises:
        InternalError: It is not of the contract.
    """
    values = message_headers or {}
    message = parse_message(data, values, job=job)
    if not isinstance(message, WholeMessage | ErrorMessage):
        raise InternalError("the stored result is not of the contract")
    error = message.error if isinstance(message, ErrorMessage) else None
    status = _STATUSES.get(values.get(headers.STATUS, ""), "ok" if error is None else "error")
    return Result(
        attempt=message.attempt,
        status=status,
        submission=submission_of(values),
        worker=values.get(headers.WORKER),
        prefill_worker=values.get(headers.PREFILL_WORKER),
        usage=not isinstance(message, WholeMessage) or message.usage,
        answer=message.answer if isinstance(message, WholeMessage) else None,
        error=error,
    )


def acknowledged_by(message: Message) -> str | None:
    """The NATS stream that acknowledges a message; None for any other message."""
    if not message.data.startswith(b'{"stream":'):
        return None
    try:
        return msgspec.json.decode(message.data, type=_Acknowledgement).stream
    except (msgspec.MsgspecError, RecursionError):
        return None


def submission_of(message_headers: Mapping[str, str] | None) -> int | None:
    """The submission that a message belongs to, from its headers."""
    return headers.number(message_headers, headers.SUBMISSION)


def status_error(status: Status) -> InferbusError | None:
    """The error that stands for a status whose error message was lost or never sent."""
    if status == "ok":
        return None
    if status == "cancelled":
        return Cancelled("the request was cancelled")
    if status == "expired":
        return DeadlineExceeded("the deadline has passed")
    return InternalError("the request failed, and the message that says why was lost")


def not_taken() -> ErrorMessage:
    """What the server's status 503 means for a live request."""
    problem = NoWorker(
        f"no worker takes requests of this model and kind: none serves them, or all are busy; {HINT}"
    )
    return ErrorMessage(attempt=1, error=problem, final=True)


def _end(values: Mapping[str, str]) -> AnswerMessage | None:
    status = _STATUSES.get(values.get(headers.STATUS, ""))
    if status is None:
        return None
    return EndMark(
        attempt=headers.number(values, headers.ATTEMPT) or 1,
        status=status,
        messages=headers.number(values, headers.CHUNKS) or 0,
        worker=values.get(headers.WORKER),
        prefill_worker=values.get(headers.PREFILL_WORKER),
    )


def _fields(data: bytes) -> dict[str, Any]:
    try:
        value = codec.decode_any(data)
    except CallerError:
        raise InternalError("an answer is neither JSON nor MessagePack") from None
    if not isinstance(value, dict):
        raise InternalError("an answer is not an object")
    return value


def _chunk(fields: dict[str, Any]) -> Chunk:
    if "choices" not in fields:
        return convert(fields, TokenChunk)
    return _checked(_without_tokens(fields))


def text_fields(data: bytes) -> dict[str, Any]:
    """The fields of a text chunk whose shape was checked.

    Raises:
        InternalError: Not an object.
    """
    return _without_tokens(_fields(data))


def _without_tokens(fields: dict[str, Any]) -> dict[str, Any]:
    # Beside text, these are for the worker that goes on after a crash.
    fields.pop("token_ids", None)
    return fields


def _checked(fields: dict[str, Any]) -> dict[str, Any]:
    """An object of the shape that readers rely on; its further fields are the caller's concern."""
    convert(fields, _Shape)
    return fields


def convert(fields: Any, kind: type[T]) -> T:
    """A part of an answer as a struct.

    Raises:
        InternalError: It is not of the contract.
    """
    try:
        return codec.convert(fields, kind)
    except CallerError as error:
        raise InternalError(f"an answer is not of the contract: {error.message}") from None


def _error(fields: dict[str, Any]) -> InferbusError:
    try:
        error = from_body(codec.convert(fields, ErrorBody))
    except CallerError:
        return InternalError("an answer is an error that is not of the contract")
    if isinstance(error, Overloaded):
        # Only live requests end with it: a durable job waits in its queue.
        return Overloaded(f"{error.message}; {HINT}", param=error.param)
    return error
