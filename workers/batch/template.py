"""Requests made of rows: a body with placeholders for the columns of a table.

`{{column}}` as the whole of a text is the row's value, of whatever type; a field whose value is null is left
out. Within other text it is put in as text. `{{column | from_json}}` reads text as JSON,
`{{column | to_json}}` writes a value as JSON text.
"""

from __future__ import annotations

import datetime as dt
import decimal
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

import msgspec

from inferbus.schemas.errors import InvalidRequest
from inferbus.schemas.kinds import ESSENTIAL
from inferbus.schemas.subjects import Kind
from inferbus.workers.batch.lines import URLS, Problem, problem_line

_PLACEHOLDER: Final = re.compile(r"\{\{\s*([^{}|]+?)\s*(?:\|\s*(\w+)\s*)?\}\}")

_JSON: Final = frozenset({"messages", "token_ids", "tokens"})
"""Fields that are never text, and never left out: a column of text holds them as JSON."""

_TEXT: Final = frozenset({"content", "prompt", "text", "input"})
"""Fields that are text, or a list of parts: numbers become text, and a row without a value has a problem."""

_MISSING: Final = "missing_required_parameter"
_INVALID: Final = "invalid_value"

_UNSENDABLE: Final = (TypeError, ValueError, OverflowError, RecursionError)
"""Raised where a value has no JSON."""

LARGEST: Final = 128 * 1024
"""Bytes of a template, which is part of a batch's record."""

Value = Callable[[Sequence[Any]], Any]
"""A part of a body, made of a row's values."""


class Template(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What is made of a row.

    Attributes:
        kind: Of the requests.
        body: Of a request; the texts in it may have placeholders.
        custom_id: A text with placeholders; None: `row-<number>`.
    """

    kind: Kind = "chat"
    body: dict[str, Any]
    custom_id: str | None = None

    @property
    def columns(self) -> list[str]:
        """The columns that it names."""
        texts = [*_texts(self.body), self.custom_id or ""]
        return list(dict.fromkeys(found[1] for text in texts for found in _PLACEHOLDER.finditer(text)))


def template(
    map: Mapping[str, Any] | None = None,
    set: Mapping[str, Any] | None = None,
    *,
    kind: Kind = "chat",
) -> Template:
    """The template of assignments.

    Args:
        map: Fields of the body, and `custom_id`, by column. Text with placeholders, and JSON with such texts,
            is as in `set`.
        set: Fields of the body that are what they say; placeholders in them are filled.
        kind: Of the requests. Those of a chat may have `prompt` and `system` instead of `messages`.

    Raises:
        InvalidRequest: It makes no request, names no column, or a placeholder cannot be read.
    """
    body: dict[str, Any] = {field: of_column(value) for field, value in (map or {}).items()}
    for field, value in (set or {}).items():
        if field in body:
            raise InvalidRequest(f"the mapping has {field} twice", param=field)
        body[field] = value
    custom_id = body.pop("custom_id", None)
    if kind == "chat" and "messages" not in body:
        texts = {role: body.pop(field, None) for field, role in (("system", "system"), ("prompt", "user"))}
        messages = [{"role": role, "content": text} for role, text in texts.items() if text is not None]
        if texts["user"] is not None:
            body = {"messages": messages, **body}
    if ESSENTIAL[kind] not in body:
        wanted = "prompt or messages" if kind == "chat" else ESSENTIAL[kind]
        raise InvalidRequest(f"the mapping has no {wanted}", param=ESSENTIAL[kind])
    if custom_id is not None and not isinstance(custom_id, str):
        raise InvalidRequest("custom_id must be a column, or a text with placeholders", param="custom_id")
    made = Template(kind=kind, body=body, custom_id=custom_id)
    Filling(made, made.columns)
    if not made.columns:
        raise InvalidRequest("the mapping names no column: every row would be the same request")
    try:
        size = len(msgspec.json.encode(made))
    except _UNSENDABLE:
        raise InvalidRequest("the mapping is not UTF-8 text") from None
    if size > LARGEST:
        raise InvalidRequest(f"the mapping has {size} bytes; {LARGEST} are allowed")
    return made


class Filling:
    """Makes lines of rows.

    Args:
        template: What is made.
        columns: The names of the values of a row.

    Raises:
        InvalidRequest: A placeholder cannot be read.
    """

    def __init__(self, template: Template, columns: Sequence[str]) -> None:
        self._columns = columns
        self._body = _compiled(template.body, None, columns)
        self._custom_id = None
        if template.custom_id is not None:
            self._custom_id = _text(template.custom_id, "custom_id", columns)
        self._url = msgspec.Raw(msgspec.json.encode(URLS[template.kind]))
        self._encode = msgspec.json.Encoder(decimal_format="number").encode

    def line(self, number: int, values: Sequence[Any]) -> bytes:
        """The line of a batch file that a row makes, or one that says why it makes none."""
        custom_id = f"row-{number}"
        try:
            if self._custom_id is not None:
                custom_id = ""
                custom_id = self._custom_id(values)
            return self._encode({"custom_id": custom_id, "url": self._url, "body": self._body(values)})
        except _Wrong as wrong:
            problem = Problem(code=wrong.code, message=wrong.message, param=wrong.column)
        except _UNSENDABLE:
            named = zip(self._columns, values, strict=True)
            column = next((column for column, value in named if not _sendable(value)), self._columns[0])
            message = f"column {column}: not UTF-8 text, or no value that JSON has"
            problem = Problem(code=_INVALID, message=message, param=column)
        return problem_line(problem, custom_id if custom_id and _sendable(custom_id) else None)


class _Wrong(Exception):
    """A value that cannot be used."""

    def __init__(self, column: str, message: str, code: str = _INVALID) -> None:
        super().__init__(message)
        self.column, self.message, self.code = column, f"column {column}: {message}", code


def _sendable(value: Any) -> bool:
    try:
        msgspec.json.encode(value)
    except _UNSENDABLE:
        return False
    return True


def of_column(value: Any, *, json: bool = False) -> Any:
    """What a field is made of by a column's name; what is no such name is a template already.

    Args:
        value: A column, or a template.
        json: Whether the column holds JSON.
    """
    if not isinstance(value, str) or "{{" in value:
        return value
    return f"{{{{{value} | from_json}}}}" if json else f"{{{{{value}}}}}"


def _texts(node: Any) -> Iterator[str]:
    if isinstance(node, str):
        yield node
    elif isinstance(node, dict | list):
        for each in node.values() if isinstance(node, dict) else node:
            yield from _texts(each)


def _compiled(node: Any, field: str | None, columns: Sequence[str]) -> Value:
    """How a part of the body is made; `field`: whose value it is."""
    if not any("{{" in text for text in _texts(node)):
        try:
            constant = msgspec.Raw(msgspec.json.encode(node))
        except _UNSENDABLE:
            raise InvalidRequest(f"{field} cannot be sent as JSON", param=field) from None
        return lambda row: constant
    if isinstance(node, dict):
        fields = [(name, _compiled(each, name, columns)) for name, each in node.items()]
        return lambda row: {name: made for name, value in fields if (made := value(row)) is not None}
    if isinstance(node, list):
        items = [_compiled(each, field, columns) for each in node]
        return lambda row: [value(row) for value in items]
    return _text(node, field, columns)


def _text(text: str, field: str | None, columns: Sequence[str]) -> Value:
    if "{{" in _PLACEHOLDER.sub("", text):
        raise InvalidRequest(f"a placeholder cannot be read: {text}", param=field)
    alone = _PLACEHOLDER.fullmatch(text)
    if alone is not None:
        return _placeholder(alone[1], alone[2], field, columns)
    parts: list[str | Value] = []
    end = 0
    for found in _PLACEHOLDER.finditer(text):
        parts += [text[end : found.start()], _placeholder(found[1], found[2], "text", columns, within=True)]
        end = found.end()
    parts.append(text[end:])
    return lambda row: "".join([part if isinstance(part, str) else part(row) for part in parts if part])


def _placeholder(
    column: str, filtered: str | None, field: str | None, columns: Sequence[str], *, within: bool = False
) -> Value:
    """How a placeholder is filled; `within`: it is a part of a text."""
    index = columns.index(column)
    read = _to_json if filtered == "to_json" else _value
    if within or field == "custom_id":
        read = _to_json if filtered == "to_json" else _text_of
    elif filtered == "from_json" or (field in _JSON and filtered is None):
        read = _from_json
    elif field in _TEXT and filtered is None:
        read = _text_or_parts
    if filtered is not None and read not in (_to_json, _from_json):
        raise InvalidRequest(f"{{{{{column} | {filtered}}}}}: no filter for this place", param=field)
    if field in _JSON and not within:
        return lambda row: _required(read(row[index], column), column)
    return lambda row: read(row[index], column)


def _value(value: Any, column: str) -> Any:
    """A value as JSON has it. A struct of Arrow has all of its fields: those that are null are left out."""
    if type(value) is str:
        return value
    if value is msgspec.UNSET:
        raise _Wrong(column, "the row has none", _MISSING)
    if isinstance(value, dict):
        return {name: _value(each, column) for name, each in value.items() if each is not None}
    if isinstance(value, list | tuple):
        return [_value(each, column) for each in value]
    if isinstance(value, bytes):
        try:
            return value.decode()
        except UnicodeDecodeError:
            raise _Wrong(column, "neither UTF-8 text nor anything else that JSON has") from None
    if isinstance(value, dt.date | dt.time):
        return value.isoformat()
    return None if value != value else value


def _required(value: Any, column: str) -> Any:
    if value is None:
        raise _Wrong(column, "the row has no value", _MISSING)
    return value


def _text_or_parts(value: Any, column: str) -> Any:
    """Text, or a list of parts of a message."""
    value = _required(_value(value, column), column)
    if isinstance(value, bool | float):
        return msgspec.json.encode(value).decode()
    return str(value) if isinstance(value, int | decimal.Decimal) else value


def _text_of(value: Any, column: str) -> str:
    value = _text_or_parts(value, column)
    if isinstance(value, list | dict):
        raise _Wrong(column, "a list or an object, not text; `| to_json` makes text of it")
    return str(value)


def _from_json(value: Any, column: str) -> Any:
    value = _value(value, column)
    if type(value) is not str:
        return value
    try:
        return msgspec.json.decode(value)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        raise _Wrong(column, "the text is not JSON") from None


def _to_json(value: Any, column: str) -> str:
    return msgspec.json.encode(_value(value, column)).decode()
