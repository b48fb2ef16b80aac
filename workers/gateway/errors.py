"""Errors as OpenAI's API has them: a status, headers and `{"error": {message, type, param, code}}`.

The one table of statuses is `inferbus.schemas.statuses`; here are the errors that only this program raises.
"""

from __future__ import annotations

import math
from typing import Any, Final

import msgspec
from starlette.exceptions import HTTPException
from starlette.responses import Response

from inferbus.schemas.errors import CallerError, InferbusError, InfrastructureError
from inferbus.schemas.statuses import http_status
from inferbus.workers.batch.errors import BatchNotFound
from inferbus.workers.client.errors import JobIdUsed, JobNotFound, TimedOut

RETRY_AFTER: Final = 1.0
"""Seconds after which to send a request again that failed for a reason that passes."""

_TYPES: Final = {401: "authentication_error", 429: "rate_limit_error"}


class InvalidKey(CallerError):
    """No API key came with the request, or one that is not known."""

    code = "invalid_api_key"


class RateLimited(InferbusError):
    """This API key has sent more requests than it may, or has as many open.

    Attributes:
        after: Seconds after which to try again.
    """

    code = "rate_limit_exceeded"
    retryable = True

    def __init__(self, message: str, *, param: str | None = None, after: float = RETRY_AFTER) -> None:
        super().__init__(message, param=param)
        self.after = after


class Restarts(InfrastructureError):
    """The answer began anew on another worker and says something else; what was sent of it is void."""

    code = "answer_restarted"


class FileNotFound(CallerError):
    """There is no file of this id."""

    code = "file_not_found"


class FileInUse(CallerError):
    """A file cannot be removed: a batch reads it."""

    code = "file_in_use"


class UnknownPath(CallerError):
    """Nothing is served at this path, or not by this method."""

    code = "unknown_url"


_OWN: Final[dict[type[InferbusError], int]] = {
    InvalidKey: 401,
    RateLimited: 429,
    JobIdUsed: 409,
    JobNotFound: 404,
    FileNotFound: 404,
    FileInUse: 409,
    BatchNotFound: 404,
    UnknownPath: 404,
    TimedOut: 504,
}


def status_of(error: InferbusError) -> int:
    """The HTTP status of an error."""
    return _OWN.get(type(error)) or http_status(error)


def body_of(error: InferbusError) -> dict[str, Any]:
    """The body of an error's answer, also of its event in a stream."""
    status = status_of(error)
    kind = _TYPES.get(status) or ("invalid_request_error" if status < 500 else "server_error")
    return {"error": {"message": error.message, "type": kind, "param": error.param, "code": error.code}}


def error_response(error: InferbusError) -> Response:
    """An error as an answer; OpenAI's clients look at `x-should-retry` before the status."""
    headers = {"x-should-retry": "true" if error.retryable else "false"}
    if error.retryable:
        after = error.after if isinstance(error, RateLimited) else RETRY_AFTER
        headers["retry-after"] = str(math.ceil(after))
    if isinstance(error, InvalidKey):
        headers["www-authenticate"] = "Bearer"
    return json_response(body_of(error), status=status_of(error), headers=headers)


def http_error(problem: HTTPException) -> Response:
    """An error of the framework's: an unknown path, or a method that a path does not have."""
    response = error_response(UnknownPath(f"{problem.detail}: see docs/gateway.md for what is served"))
    response.status_code = problem.status_code
    for name, value in (problem.headers or {}).items():
        response.headers[name] = value
    return response


def json_response(body: Any, *, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """A JSON answer."""
    return Response(msgspec.json.encode(body), status, headers, media_type="application/json")
