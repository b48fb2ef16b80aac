"""Options that say which request is made of a row of a table."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
import msgspec

from inferbus.schemas.errors import InvalidRequest
from inferbus.schemas.subjects import KINDS
from inferbus.workers.batch.template import Template, of_column, template


def mapping_options(command: Any) -> Any:
    """Gives a command the options that `template_of` reads."""
    for option in reversed(
        [
            click.option(
                "--map",
                "mapped",
                multiple=True,
                metavar="FIELD=COLUMN",
                help="A field of the request, by column; FIELD:=COLUMN reads the column as JSON. "
                "FIELD='text {{COLUMN}}', a whole body in JSON, or @FILE with one are templates.",
            ),
            click.option(
                "--set",
                "constants",
                multiple=True,
                metavar="FIELD=VALUE",
                help="A field that all requests have: JSON, or text.",
            ),
            click.option("--kind", type=click.Choice(KINDS), help="What --map makes; default: chat."),
        ]
    ):
        command = option(command)
    return command


def template_of(flags: dict[str, Any]) -> Template | None:
    """The template that a command's options describe; None: there is none. Removes them from `flags`.

    Raises:
        click.UsageError: It cannot be read, or makes no request.
    """
    mapped, constants, kind = flags.pop("mapped"), flags.pop("constants"), flags.pop("kind")
    if not mapped:
        if constants or kind:
            raise click.UsageError("--set and --kind need --map")
        return None
    columns: dict[str, Any] = {}
    fields: dict[str, Any] = {}
    for text in mapped:
        if text.startswith(("@", "{")):
            _merge(fields, _body(text))
            continue
        field, value = _split("--map", text)
        if field.endswith(":"):
            field = field[:-1]
            value = of_column(value, json=True)
        _merge(columns, {field: value})
    for text in constants:
        field, value = _split("--set", text)
        _merge(fields, {field: _constant(value)})
    try:
        return template(columns, fields, kind=kind or "chat")
    except InvalidRequest as error:
        raise click.UsageError(error.message) from None


def _split(option: str, text: str) -> tuple[str, str]:
    field, equals, value = text.partition("=")
    if not equals or not field or not value:
        raise click.UsageError(
            f"{option} {text}: wants {'FIELD=COLUMN' if option == '--map' else 'FIELD=VALUE'}"
        )
    return field, value


def _merge(fields: dict[str, Any], more: dict[str, Any]) -> None:
    for field in more:
        if field in fields:
            raise click.UsageError(f"the mapping has {field} twice")
    fields.update(more)


def _body(text: str) -> dict[str, Any]:
    """A body in JSON, or in the file that is named."""
    where = text if text.startswith("@") else "--map"
    try:
        data = Path(text[1:]).read_bytes() if text.startswith("@") else text.encode()
        return msgspec.json.decode(data, type=dict[str, Any])
    except OSError as error:
        raise click.UsageError(f"{where}: {error.strerror}") from None
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise click.UsageError(f"{where}: wants an object in JSON: {error}") from None


def _constant(value: str) -> Any:
    try:
        return msgspec.json.decode(value)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return value
