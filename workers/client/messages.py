"""What one message of an answer says, read from its body and headers.

Kind and content type are seen from the bytes: a JSON object starts with `{`, which no MessagePack map
does, and the shapes of the contract exclude each other. So a stream can be read by someone who knows
nothing but a job's id.
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
    from_body,
)
from inferbus.schemas.headers import Continuation, Status

T = TypeVar("T")

Chunk = dict[str, Any] | TokenChunk
"""One chunk: OpenAI's object for `chat` and `completions`, a struct for `tokens`."""

Answer = dict[str, Any] | TokenAnswer
"""A whole answer, likewise."""

_STATUSES: Final[dict[str, Status]] = {status: status for status in get_args(Status)}
_NO_RESPONDERS: Final = "503"


class Piece(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A chunk and its place.

    Attributes:
        attempt: From 1.
        seq: From 0 within the attempt.
        chunk: What it adds.
        continues: On an attempt's first chunk, where that goes on after an older attempt.
    """

    attempt: int
    seq: int
    chunk: Chunk
    continues: Continuation | None = None


class Whole(msgspec.Struct, frozen=True, kw_only=True):
    """An answer in one piece."""

    attempt: int
    answer: Answer


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """An attempt's error; it is the answer. After a `final` one no end mark comes."""

    attempt: int
    error: InferbusError
    final: bool = False


class End(msgspec.Struct, frozen=True, kw_only=True):
    """The end mark.

    Attributes:
        attempt: Whose end it is.
        status: How it ended.
        messages: How many messages the attempt sent before.
        worker: Who answered.
        prefill_worker: The prefill worker that served it, if one did.
    """

    attempt: int
    status: Status
    messages: int
    worker: str | None = None
    prefill_worker: str | None = None


Message = Piece | Whole | Failure | End


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """The one final result of a durable job: an answer, or an error."""

    attempt: int
    status: Status
    submission: int | None
    worker: str | None
    prefill_worker: str | None
    answer: Answer | None = None
    error: InferbusError | None = None


def read(data: bytes, found: Mapping[str, str] | None) -> Message | None:
    """The message, or None for one that is of no concern here, such as the event of a coming retry.

    Raises:
        InternalError: The body is not of the contract.
    """
    found = found or {}
    if not data:
        return _end(found)
    fields = _fields(data)
    attempt = fields.get("attempt")
    if not isinstance(attempt, int):
        attempt = headers.number(found, headers.ATTEMPT) or 1
    if isinstance(fields.get("error"), dict):
        return Failure(attempt=attempt, error=_error(fields["error"]))
    if isinstance(fields.get("seq"), int):
        return Piece(
            attempt=attempt,
            seq=fields["seq"],
            chunk=_chunk(fields),
            continues=headers.parse_continues(found),
        )
    if "choices" in fields:
        # Token answers have no `object`, which OpenAI's always have.
        answer = _checked(fields, "message") if "object" in fields else _convert(fields, TokenAnswer)
        return Whole(attempt=attempt, answer=answer)
    return None


def read_result(data: bytes, found: Mapping[str, str] | None) -> Result:
    """The stored result of a durable job.

    Raises:
        InternalError: It is not of the contract.
    """
    found = found or {}
    message = read(data, found)
    if not isinstance(message, Whole | Failure):
        raise InternalError("the stored result is not of the contract")
    error = message.error if isinstance(message, Failure) else None
    status = _STATUSES.get(found.get(headers.STATUS, ""), "ok" if error is None else "error")
    return Result(
        attempt=message.attempt,
        status=status,
        submission=submission(found),
        worker=found.get(headers.WORKER),
        prefill_worker=found.get(headers.PREFILL_WORKER),
        answer=message.answer if isinstance(message, Whole) else None,
        error=error,
    )


def submission(found: Mapping[str, str] | None) -> int | None:
    """The submission that a message answers, where it says so."""
    return headers.number(found, headers.SUBMISSION)


def error_of(status: Status) -> InferbusError | None:
    """The error of a status, for an end mark whose error message was lost or never sent."""
    if status == "ok":
        return None
    if status == "cancelled":
        return Cancelled("the request was cancelled")
    if status == "expired":
        return DeadlineExceeded("the deadline has passed")
    return InternalError("the request failed, and the message that says why was lost")


def _end(found: Mapping[str, str]) -> Message | None:
    if found.get("Status") == _NO_RESPONDERS:
        problem = NoWorker("nobody serves this model and kind at the moment")
        return Failure(attempt=1, error=problem, final=True)
    status = _STATUSES.get(found.get(headers.STATUS, ""))
    if status is None:
        return None
    return End(
        attempt=headers.number(found, headers.ATTEMPT) or 1,
        status=status,
        messages=headers.number(found, headers.CHUNKS) or 0,
        worker=found.get(headers.WORKER),
        prefill_worker=found.get(headers.PREFILL_WORKER),
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
    """An object with choices that can be worked with."""
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
        return from_body(msgspec.convert(fields, ErrorBody))
    except msgspec.ValidationError:
        return InternalError("an answer is an error that is not of the contract")
