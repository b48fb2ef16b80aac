"""JSON and MessagePack, and the guards that a decoder of strangers' bytes needs."""

from __future__ import annotations

import re
from typing import Any, Final, TypeVar

import msgspec

from schemas import limits
from schemas.errors import InvalidRequest, UndecodableBody, UnsupportedContentType

T = TypeVar("T")

JSON: Final = "application/json"
MSGPACK: Final = "application/msgpack"

_ALIASES: Final = {
    "": JSON,
    "application/json": JSON,
    "text/json": JSON,
    "application/msgpack": MSGPACK,
    "application/x-msgpack": MSGPACK,
    "application/vnd.msgpack": MSGPACK,
}

_json = msgspec.json.Encoder()
_msgpack = msgspec.msgpack.Encoder()
_PATH: Final = re.compile(r" - at `\$\.?(?P<path>[^`]*)`$")


def content_type(header: str | None) -> str:
    """`JSON` or `MSGPACK` for a `Content-Type` header; parameters such as a charset are ignored.

    Raises:
        UnsupportedContentType: For any other type.
    """
    named = (header or "").partition(";")[0].strip().lower()
    try:
        return _ALIASES[named]
    except KeyError:
        raise UnsupportedContentType(
            f"Content-Type must be {JSON} or {MSGPACK}", param="Content-Type"
        ) from None


def encode(value: Any, kind: str = JSON) -> bytes:
    """A struct or plain value as bytes of one content type."""
    return _msgpack.encode(value) if kind == MSGPACK else _json.encode(value)


def decode(data: bytes, type: type[T], kind: str = JSON) -> T:
    """Bytes as `type`.

    Raises:
        UndecodableBody: The bytes are not of that content type, or nested too deeply.
        InvalidRequest: They are, but not of that type; `param` names the field.
    """
    decoder = msgspec.msgpack.decode if kind == MSGPACK else msgspec.json.decode
    try:
        return decoder(data, type=type)
    except msgspec.ValidationError as error:
        message, param = split_path(str(error))
        raise InvalidRequest(message, param=param) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise UndecodableBody(f"the body is not valid {kind}: {_reason(error)}") from None


def decode_object(data: bytes, kind: str = JSON) -> dict[str, Any]:
    """The body of a request as a plain dictionary, with its nesting checked.

    Raises:
        UndecodableBody: Not of that content type, not an object, or nested too deeply.
    """
    decoder = msgspec.msgpack.decode if kind == MSGPACK else msgspec.json.decode
    try:
        value = decoder(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, ValueError) as error:
        raise UndecodableBody(f"the body is not valid {kind}: {_reason(error)}") from None
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
        raise UndecodableBody("the body must be an object")
    if _depth(value) > limits.NESTING_DEPTH:
        raise UndecodableBody(f"the body is nested more than {limits.NESTING_DEPTH} levels deep")
    return value


def split_path(message: str) -> tuple[str, str | None]:
    """msgspec's message, apart from the path of the field that it is about.

    The texts that msgspec makes name types and fields, never values, so they are safe to send and to log.
    """
    found = _PATH.search(message)
    if found is None:
        return message, None
    path = found["path"] or None
    text = message[: found.start()]
    return (f"{path}: {text}" if path else text), path


def _reason(error: Exception) -> str:
    if isinstance(error, RecursionError):
        return "nested too deeply"
    if isinstance(error, UnicodeDecodeError):
        return "not UTF-8"
    return str(error)


def _depth(value: Any) -> int:
    """Levels of nesting of an object, without recursion; stops once the limit is passed."""
    deepest, stack = 1, [(value, 1)]
    while stack and deepest <= limits.NESTING_DEPTH:
        current, level = stack.pop()
        deepest = max(deepest, level)
        children = current.values() if isinstance(current, dict) else current
        stack.extend((child, level + 1) for child in children if isinstance(child, dict | list))
    return deepest
