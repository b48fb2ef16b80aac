"""Builds what a client sends: ids, headers and bodies."""

from __future__ import annotations

import datetime as dt
import math
import re
import secrets
from collections.abc import Mapping
from typing import Any, Final

from inferbus.schemas import codec, headers
from inferbus.schemas.errors import InvalidRequest
from inferbus.schemas.subjects import COMPUTED, Kind, escape
from inferbus.workers import tracing

_ID: Final = re.compile(r"[!-~]+")
_UNENCODABLE: Final = (TypeError, OverflowError, RecursionError, ValueError)

Deadline = float | dt.timedelta | dt.datetime
"""Seconds from the request's arrival, or an aware moment."""


def request_headers(
    job: str, *, content_type: str, deadline: Deadline | None, traceparent: str | None
) -> dict[str, str]:
    """The headers of a request.

    Args:
        job: Its id.
        content_type: Of its body.
        deadline: When it expires.
        traceparent: W3C trace context; None: the application's current span, if it has one.

    Raises:
        InvalidRequest: The deadline is not finite.
    """
    built = {headers.JOB_ID: job, headers.CONTENT_TYPE: content_type}
    if deadline is not None:
        built[headers.DEADLINE] = _deadline_text(deadline)
    return built | (tracing.carried() if traceparent is None else {headers.TRACEPARENT: traceparent})


def request_body(kind: Kind, fields: Mapping[str, Any], *, streamed: bool | None) -> dict[str, Any]:
    """A body that asks for the usage in a streamed answer too; of a computed kind, the body as it is.

    Args:
        kind: Of the request.
        fields: The body as the caller gave it.
        streamed: The body's `stream`; None leaves it as it is.
    """
    body = dict(fields)
    if kind in COMPUTED:
        return body
    if streamed is not None:
        body["stream"] = streamed
    if kind != "tokens" and body.get("stream") is not False and body.get("stream_options") is None:
        body["stream_options"] = {"include_usage": True}
    return body


def encode_body(body: Mapping[str, Any], content_type: str) -> bytes:
    """A body as bytes.

    Raises:
        InvalidRequest: A value cannot be sent; `param` names its field.
    """
    try:
        return codec.encode(body, content_type)
    except _UNENCODABLE as error:
        for name, value in body.items():
            try:
                codec.encode({name: value}, content_type)
            except _UNENCODABLE as found:
                field = str(name).encode("ascii", "backslashreplace").decode()
                raise InvalidRequest(f"{field!r} cannot be sent: {_reason(found)}", param=field) from None
        raise InvalidRequest(f"the body cannot be sent: {_reason(error)}") from None


def checked_id(job: str | None) -> str:
    """A job id that subjects and headers can carry; a random one for None.

    Raises:
        InvalidSubject: Empty, or too long.
        InvalidRequest: Not printable ASCII.
    """
    if job is None:
        return secrets.token_hex(16)
    escape(job)
    if not _ID.fullmatch(job):
        raise InvalidRequest("a job id is printable ASCII without spaces", param="job_id")
    return job


def _deadline_text(deadline: Deadline) -> str:
    if isinstance(deadline, dt.datetime):
        return deadline.isoformat()
    try:
        seconds = float(deadline.total_seconds() if isinstance(deadline, dt.timedelta) else deadline)
    except OverflowError:
        seconds = math.inf
    if not math.isfinite(seconds):
        raise InvalidRequest("the deadline must be a finite number of seconds", param="deadline")
    return repr(seconds)


def _reason(error: Exception) -> str:
    """Why a value cannot be encoded, without quoting it."""
    if isinstance(error, RecursionError):
        return "it is nested too deeply, or contains itself"
    if isinstance(error, UnicodeEncodeError):
        return "a text in it is not valid Unicode"
    if isinstance(error, OverflowError):
        return "a number in it has more than 64 bits"
    return "it holds an object of a type that neither JSON nor MessagePack has"
