"""Text and JSON that enter and leave a command, whatever the encoding of the terminal."""

from __future__ import annotations

import codecs
import io
import re
import sys
from pathlib import Path
from typing import Any, Final

import click

from inferbus.schemas import codec
from inferbus.schemas.errors import InferbusError, UndecodableBody

_CONTROL: Final = re.compile("[\x7f-\x9f]")
"""Control characters that JSON need not escape, and terminals obey."""

_BATCH_LINE: Final = {"custom_id", "method", "url", "body"}
"""Fields of a line of OpenAI's batch files."""


def tolerate_encodings() -> None:
    """Lets output that the terminal's encoding lacks appear escaped, instead of raising."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def print_json(value: Any) -> None:
    """Prints JSON in UTF-8, which is JSON's encoding on every terminal, without control characters."""
    text = codec.encode(value).decode()
    click.echo(_CONTROL.sub(lambda found: f"\\u{ord(found[0]):04x}", text).encode())


def read_text(given: str) -> str:
    """A text argument: `-` is standard input, `@FILE` a file, everything else the text itself.

    Raises:
        click.UsageError: The file cannot be read, is not text, or is named without `@`.
    """
    if given == "-":
        return _decoded(_standard_input(), "standard input", sys.stdin.encoding)
    if given.startswith("@") and not any(char.isspace() for char in given):
        file = Path(given[1:])
        try:
            return _decoded(file.read_bytes(), str(file))
        except OSError as error:
            raise click.UsageError(f"{file}: {error.strerror}") from None
    if _names_a_file(given):
        raise click.UsageError(f"{given} is a file: @{given} sends its content")
    return given


def read_body(given: str) -> dict[str, Any]:
    """The body of a job: `-` is standard input, everything else a file, also as `@FILE`.

    Raises:
        click.UsageError: It cannot be read, or is not one JSON object; says what it is where that is known.
    """
    if given.lstrip().startswith("{"):
        return parse_body(given.encode(errors="surrogateescape"))
    if given == "-":
        return parse_body(_standard_input())
    file = Path(given.removeprefix("@"))
    try:
        return parse_body(file.read_bytes())
    except OSError as error:
        raise click.UsageError(f"{file}: {error.strerror}") from None


def parse_body(data: bytes) -> dict[str, Any]:
    """The body of a job from its bytes, see `read_body`."""
    data = data.removeprefix(codecs.BOM_UTF8)
    if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise click.UsageError("the body is UTF-16; save it as UTF-8")
    lines = data.strip().splitlines()
    if not lines:
        raise click.UsageError("the body is empty")
    try:
        fields = codec.decode_object(data)
    except InferbusError as error:
        if len(lines) > 1 and all(map(_is_object, lines[:2])):
            raise click.UsageError(
                "the body has one JSON object per line, as a batch file has: `inferbus batch run` takes it"
            ) from None
        raise click.UsageError(error.message) from None
    if fields.keys() >= _BATCH_LINE:
        raise click.UsageError(
            "the body is a line of a batch file; submit what its field 'body' holds, with --job-id for its "
            "'custom_id'"
        )
    return fields


def _is_object(line: bytes) -> bool:
    try:
        codec.decode_object(line)
    except UndecodableBody:
        return False
    except InferbusError:
        return True
    return True


def _standard_input() -> bytes:
    data = getattr(sys.stdin, "buffer", sys.stdin).read()
    return data if isinstance(data, bytes) else str(data).encode()


def _decoded(data: bytes, source: str, *encodings: str | None) -> str:
    """A text, from UTF-8 or the first other encoding that fits."""
    for encoding in ("utf-8-sig", *encodings):
        try:
            return data.decode(encoding or "utf-8")
        except (UnicodeDecodeError, LookupError):
            continue
    raise click.UsageError(f"{source} is not UTF-8 text")


def _names_a_file(given: str) -> bool:
    """Whether a text is likely meant as a file's name: it has a folder or suffix, and exists."""
    if any(char.isspace() for char in given):
        return False
    try:
        path = Path(given)
        return (bool(path.suffix) or len(path.parts) > 1) and path.is_file()
    except (OSError, ValueError):
        return False
