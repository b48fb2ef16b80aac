"""Parses the messages of an answer: body and headers into structs.

Content type and kind follow from the bytes: a JSON object starts with `{`, which no MessagePack map does, and
the shapes of the contract exclude each other. So an answer can be read with nothing but a job's id.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, TypeVar, get_args

import msgspec

from inferbus.schemas import codec, headers
from inferbus.schemas.answers import TokenAnswer, TokenChunk
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

T = TypeVar("T")

Chunk = dict[str, Any] | TokenChunk
"""One chunk: OpenAI's object for `chat` and `completions`, a struct for `tokens`."""

Answer = dict[str, Any] | TokenAnswer
"""A whole answer: OpenAI's object for `chat` and `completions`, a struct for `tokens`."""

HINT: Final = "a durable job waits until a worker is free"
"""What to do where no worker takes a live request."""

_STATUSES: Final[dict[str, Status]] = {status: status for status in get_args(Status)}
_NO_RESPONDERS: Final = "503"


class ChunkMessage(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A chunk and its position.

    Attributes:
        attempt: From 1.
        seq: From 0 within the attempt.
        chunk: The content.
        continues: On the first chunk of an attempt that continues an older one: which, and after how many
            chunks.
    """

    attempt: int
    seq: int
    chunk: Chunk
    continues: Continuation | None = None


class WholeMessage(msgspec.Struct, frozen=True, kw_only=True):
    """An answer in one piece."""

    attempt: int
    answer: Answer


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


AnswerMessage = ChunkMessage | WholeMessage | ErrorMessage | EndMark


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """The one final result of a durable job: an answer, or an error."""

    attempt: int
    status: Status
    submission: int | None
    worker: str | None
    prefill_worker: str | None
    answer: Answer | None = None
    error: InferbusError | None = None


def parse_message(
    data: bytes, message_headers: Mapping[str, str] | None, *, status: str = ""
) -> AnswerMessage | None:
    """The message, or None for one without content, such as the announcement of a retry.

    Args:
        data: The body.
        message_headers: The headers.
        status: The server's, where the message is its own.

    Raises:
        InternalError: The body is not of the contract.
    """
    values = message_headers or {}
    if not data:
        return _end(values, status)
    fields = _fields(data)
    attempt = fields.get("attempt")
    if not isinstance(attempt, int):
        attempt = headers.number(values, headers.ATTEMPT) or 1
    if isinstance(fields.get("error"), dict):
        return ErrorMessage(attempt=attempt, error=_error(fields["error"]))
    if isinstance(fields.get("seq"), int):
        return ChunkMessage(
            attempt=attempt,
            seq=fields["seq"],
            chunk=_chunk(fields),
            continues=headers.parse_continues(values),
        )
    if "choices" in fields:
        # Token answers have no `object`, which OpenAI's always have.
        answer = _checked(fields, "message") if "object" in fields else _convert(fields, TokenAnswer)
        return WholeMessage(attempt=attempt, answer=answer)
    return None


def parse_result(data: bytes, message_headers: Mapping[str, str] | None) -> Result:
    """The stored result of a durable job.

    Raises:
        InternalError: It is not of the contract.
    """
    values = message_headers or {}
    message = parse_message(data, values)
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
        answer=message.answer if isinstance(message, WholeMessage) else None,
        error=error,
    )


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


def _end(values: Mapping[str, str], server_status: str) -> AnswerMessage | None:
    if server_status == _NO_RESPONDERS:
        problem = NoWorker(
            f"no worker takes requests of this model and kind: none serves them, or all are busy; {HINT}"
        )
        return ErrorMessage(attempt=1, error=problem, final=True)
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
        return _convert(fields, TokenChunk)
    # Beside text, these are for the worker that goes on after a crash.
    fields.pop("token_ids", None)
    return _checked(fields, "delta")


def _checked(fields: dict[str, Any], content: str) -> dict[str, Any]:
    """An object whose choices have the shape of the contract."""
    choices = fields["choices"]
    if not isinstance(choices, list) or not all(
        isinstance(choice, dict)
        and isinstance(choice.get("index", 0), int)
        and isinstance(choice.get(content), dict | None)
        for choice in choices
    ):
        raise InternalError("an answer is not of the contract: its choices")
    return fields


def _convert(fields: dict[str, Any], kind: type[T]) -> T:
    try:
        return msgspec.convert(fields, kind)
    except msgspec.ValidationError as error:
        raise InternalError(f"an answer is not of the contract: {error}") from None


def _error(fields: dict[str, Any]) -> InferbusError:
    try:
        error = from_body(msgspec.convert(fields, ErrorBody))
    except msgspec.ValidationError:
        return InternalError("an answer is an error that is not of the contract")
    if isinstance(error, Overloaded):
        # Only live requests end with it: a durable job waits in its queue.
        return Overloaded(f"{error.message}; {HINT}", param=error.param)
    return error
