"""JSON and MessagePack, and the guards that a decoder of strangers' bytes needs."""

from __future__ import annotations

import re
from typing import Any, Final, TypeVar

import msgspec

from inferbus.schemas import limits, shape
from inferbus.schemas.errors import InvalidRequest, UndecodableBody, UnsupportedContentType

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
_PATH: Final = re.compile(r" - at (?:`key` in )?`\$(?P<path>[^`]*)`$")
_QUOTED: Final = re.compile(r"^(Invalid (?:enum )?value|Object contains unknown field) .*", re.DOTALL)
FAULTS: Final = (msgspec.MsgspecError, RecursionError, ValueError, TypeError, OverflowError)
"""What msgspec raises for bytes that it cannot read: its own errors, and Python's for single values."""

_SCALARS: Final = frozenset({str, int, float, bool, type(None)})
_CONTAINERS: Final = frozenset({dict, list})
_JSON_TYPES: Final = _SCALARS | _CONTAINERS


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
        UndecodableBody: The bytes are not of that content type, nested too deeply, or of too many parts.
        InvalidRequest: They are, but not of that type; `param` names the field.
    """
    shape.check(data, msgpack=kind == MSGPACK)
    return _decode(data, type, kind)


def decode_any(data: bytes, type: Any = Any) -> Any:
    """An answer of either content type, which the first byte tells: no MessagePack map starts with `{`.

    It may hold more than a request: log probabilities are an object for every few bytes.

    Raises:
        UndecodableBody: Neither JSON nor MessagePack, nested too deeply, or of too many parts.
        InvalidRequest: Not of that type; `param` names the field.
    """
    kind = JSON if data[:1] == b"{" else MSGPACK
    parts = max(limits.PARTS, len(data) // limits.PART_BYTES)
    shape.check(data, msgpack=kind == MSGPACK, parts=parts, values=len(data))
    return _decode(data, type, kind)


def convert(value: Any, type: type[T]) -> T:
    """A decoded value as `type`.

    Raises:
        InvalidRequest: Not of that type; `param` names the field.
    """
    try:
        return msgspec.convert(value, type)
    except msgspec.ValidationError as error:
        message, param = split_path(str(error))
        raise InvalidRequest(message, param=param) from None
    except FAULTS as error:
        raise InvalidRequest(f"a value cannot be read: {_reason(error)}") from None


def decode_object(data: bytes, kind: str = JSON) -> dict[str, Any]:
    """The body of a request as a plain dictionary of what JSON can say, with its nesting checked.

    Of two equal keys in an object the last one counts. MessagePack's integer keys become their decimal
    text, as JSON would have them; its binary, timestamp and extension values are refused.

    Raises:
        UndecodableBody: Not of that content type, not an object, nested too deeply, or of too many parts.
        InvalidRequest: A field holds what JSON cannot say; `param` names it.
    """
    try:
        value = decode(data, object, kind)
    except InvalidRequest as error:  # Of a number that Python cannot hold; there is no type to be wrong.
        raise UndecodableBody(f"the body is not valid {kind}: {error.message}") from None
    if not isinstance(value, dict):
        raise UndecodableBody("the body must be an object")
    _check_shape(value)
    return value


def split_path(message: str, root: str = "") -> tuple[str, str | None]:
    """Splits msgspec's message from the path of the field that it is about.

    The result is safe to send and to log: what msgspec's texts quote of the data is cut off.

    Args:
        message: msgspec's.
        root: Path of the value that msgspec was given.
    """
    text, inner = _parts(message)
    path = (root + inner).removeprefix(".")
    return (f"{path}: {text}", path) if path else (text, None)


def bounded(name: str) -> str:
    """A name that a caller chose, short enough for a message."""
    return name if len(name) <= limits.NAME_CHARS else f"{name[: limits.NAME_CHARS]}…"


def _decode(data: bytes, type: type[T], kind: str) -> T:
    decoder = msgspec.msgpack.decode if kind == MSGPACK else msgspec.json.decode
    try:
        return decoder(data, type=type)
    except msgspec.ValidationError as error:
        message, param = split_path(str(error))
        raise InvalidRequest(message, param=param) from None
    except FAULTS as error:
        raise UndecodableBody(f"the body is not valid {kind}: {_reason(error)}") from None


def _parts(message: str) -> tuple[str, str]:
    found = _PATH.search(message)
    text = message[: found.start()] if found else message
    # An entry of a dictionary has no name in msgspec's paths: the dictionary is what is at fault.
    return _QUOTED.sub(r"\1", text), found["path"].partition("[...]")[0] if found else ""


def _reason(error: Exception) -> str:
    if isinstance(error, RecursionError):
        return "nested too deeply"
    if isinstance(error, UnicodeDecodeError):
        return "not UTF-8"
    return _parts(str(error))[0]


def _check_shape(body: dict[Any, Any]) -> None:
    """One pass over the objects and arrays of a body, without recursion; scalars only by type."""
    stack: list[tuple[str, Any, int]] = [("", body, 1)]
    while stack:
        field, current, level = stack.pop()
        if level > limits.NESTING_DEPTH:
            raise UndecodableBody(f"the body is nested more than {limits.NESTING_DEPTH} levels deep")
        children = current
        if type(current) is dict:
            if set(map(type, current)) - {str}:
                _rename_keys(field, current)
            children = current.values()
        kinds = set(map(type, children))
        if kinds <= _SCALARS:
            continue
        if kinds - _JSON_TYPES:
            field = field or next(name for name, child in body.items() if type(child) not in _JSON_TYPES)
            raise InvalidRequest(f"{bounded(field)!r} holds what JSON cannot say", param=bounded(field))
        named = current.items() if level == 1 else ((field, child) for child in children)
        stack.extend(
            (name, child, level + 1) for name, child in named if type(child) in _CONTAINERS and child
        )


def _rename_keys(field: str, value: dict[Any, Any]) -> None:
    renamed = {str(key) if type(key) is int else key: child for key, child in value.items()}
    if len(renamed) != len(value) or any(type(key) is not str for key in renamed):
        where = repr(bounded(field)) if field else "the body"
        raise InvalidRequest(f"{where} has keys that JSON cannot say", param=bounded(field) or None)
    value.clear()
    value.update(renamed)
