"""Reads a request of OpenAI's API: the body within its limit, and of its fields only what the gateway needs.

All other fields go on as the bytes that came. What is wrong with them, the worker says.
"""

from __future__ import annotations

import re
from typing import Any, Final

import msgspec
from starlette.requests import Request

from inferbus.schemas import codec
from inferbus.schemas.errors import InvalidRequest, PayloadTooLarge, UndecodableBody, UnsupportedContentType
from inferbus.schemas.requests import COMPLETION_TOKENS, NESTED_SAMPLING, bounds_tokens
from inferbus.schemas.subjects import COMPUTED, Kind, escape

LONGEST_WAIT: Final = 300.0
"""Seconds that `Prefer: wait=…` may ask for."""

_IDEMPOTENCY_KEY: Final = re.compile(r"[!-.0-~]{1,128}")
_WAIT: Final = re.compile(r"\bwait=(\d{1,6})\b")
_NULL: Final = msgspec.Raw(b"null")
_decoder: Final = msgspec.json.Decoder(dict[str, msgspec.Raw])


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """A request as it goes onto the bus.

    Attributes:
        kind: Of the request.
        model: That it names.
        body: Its fields, undecoded, without those that only the gateway reads.
        streamed: Whether chunks are wanted.
        background: Whether the answer is to be fetched later.
        traceparent: W3C trace context.
    """

    kind: Kind
    model: str
    body: dict[str, Any]
    streamed: bool
    background: bool
    traceparent: str | None


async def read_body(request: Request, limit: int) -> bytes:
    """The body of a request.

    Raises:
        PayloadTooLarge: Over the limit; the rest is not read.
    """
    declared = request.headers.get("content-length", "")
    size = int(declared) if declared.isascii() and declared.isdigit() and len(declared) < 19 else 0
    parts: list[bytes] = []
    if size <= limit:
        size = 0
        async for part in request.stream():
            size += len(part)
            if size > limit:
                break
            parts.append(part)
    if size > limit:
        raise PayloadTooLarge(f"the body is larger than {limit} bytes")
    return b"".join(parts)


async def read_json(request: Request, limit: int) -> bytes:
    """The body of a request, which must be JSON.

    Raises:
        UnsupportedContentType: It is said to be something else. It also keeps pages of other sites from
            sending requests: a browser asks before it sends JSON to another site.
        PayloadTooLarge: Over the limit.
    """
    if codec.content_type(request.headers.get("content-type") or "none") != codec.JSON:
        raise UnsupportedContentType(f"Content-Type must be {codec.JSON}", param="Content-Type")
    return await read_body(request, limit)


async def read_request(request: Request, kind: Kind, *, limit: int) -> Asked:
    """A request for an answer.

    Raises:
        UnsupportedContentType: Not JSON.
        PayloadTooLarge: Over the limit.
        UndecodableBody: Not a JSON object.
        InvalidRequest: A field that the gateway reads is missing or of the wrong type.
    """
    fields = _fields(await read_json(request, limit))
    model = _field(fields, "model", str)
    if not model:
        raise InvalidRequest("model is missing", param="model")
    escape(model)
    streamed = bool(_field(fields, "stream", bool))
    background = bool(_field(fields, "background", bool)) or "respond-async" in _preferences(request)
    fields.pop("background", None)
    body: dict[str, Any] = {**fields, "stream": streamed}
    if kind in COMPUTED and streamed:
        raise InvalidRequest("this answer comes in one piece", param="stream")
    options = _field(fields, "stream_options", dict)
    if streamed and options is None:
        # OpenAI sends the usage only where it is asked for; our client asks for it by default.
        body["stream_options"] = {"include_usage": False}
    if kind == "completions" and not _bounded(fields):
        body["max_tokens"] = COMPLETION_TOKENS
    return Asked(
        kind=kind,
        model=model,
        body=body,
        streamed=streamed,
        background=background,
        traceparent=request.headers.get("traceparent"),
    )


def idempotency_key(request: Request) -> str | None:
    """The id that a request asks to have as a job; None: it need not be one.

    Raises:
        InvalidRequest: No job can have this id.
    """
    key = request.headers.get("idempotency-key")
    if key is not None and not _IDEMPOTENCY_KEY.fullmatch(key):
        what = "1 to 128 printable ASCII characters, without spaces and /"
        raise InvalidRequest(f"Idempotency-Key must be {what}", param="Idempotency-Key")
    return key


def page(request: Request, objects: list[dict[str, Any]], *, limit: int) -> dict[str, Any]:
    """A part of a list, as `after` and `limit` ask for it.

    Args:
        request: With those two.
        objects: All of them, each with its id.
        limit: Where the request names none.

    Raises:
        InvalidRequest: `limit` is no number from 1 to 10,000.
    """
    asked, after = request.query_params.get("limit"), request.query_params.get("after")
    if asked is not None:
        limit = int(asked) if asked.isascii() and asked.isdigit() and len(asked) < 6 else 0
        if not 1 <= limit <= 10_000:
            raise InvalidRequest("limit must be a number from 1 to 10000", param="limit")
    first = next((n for n, each in enumerate(objects, 1) if each["id"] == after), 0)
    shown = objects[first : first + limit]
    return {
        "object": "list",
        "data": shown,
        "first_id": shown[0]["id"] if shown else None,
        "last_id": shown[-1]["id"] if shown else None,
        "has_more": first + limit < len(objects),
    }


def wait_of(request: Request) -> float:
    """Seconds for which a request prefers to wait (RFC 7240)."""
    found = _WAIT.search(",".join(_preferences(request)))
    return min(float(found[1]), LONGEST_WAIT) if found else 0.0


def _preferences(request: Request) -> list[str]:
    return [each.strip().lower() for value in request.headers.getlist("prefer") for each in value.split(",")]


def _fields(data: bytes) -> dict[str, msgspec.Raw]:
    try:
        fields = _decoder.decode(data.removeprefix(b"\xef\xbb\xbf"))
    except msgspec.ValidationError:
        raise UndecodableBody("the body must be a JSON object") from None
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise UndecodableBody(f"the body is not valid JSON: {reason}") from None
    # `null` is the default everywhere.
    return {name: value for name, value in fields.items() if value != _NULL}


def _field(fields: dict[str, msgspec.Raw], name: str, kind: type[Any]) -> Any:
    if name not in fields:
        return None
    try:
        return msgspec.json.decode(fields[name], type=kind | None)
    except (msgspec.DecodeError, UnicodeDecodeError):
        what = {str: "a string", bool: "a boolean"}.get(kind, "an object")
        raise InvalidRequest(f"{name} must be {what}", param=name) from None


def _bounded(fields: dict[str, msgspec.Raw]) -> bool:
    """Whether a body says how many tokens it wants at most."""
    nested = {name: _field(fields, name, dict[str, Any]) for name in NESTED_SAMPLING if name in fields}
    return bounds_tokens(fields | nested)
