"""Tables, sizes and times for a terminal, without control characters from foreign names."""

from __future__ import annotations

import datetime as dt
import shutil
import sys
from collections.abc import Iterable, Sequence
from typing import Final

import click

GAP: Final = "  "
_UNITS: Final = ((86400.0, "d"), (3600.0, "h"), (60.0, "m"), (1.0, "s"))


def print_table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Prints a table without lines; None is an empty cell.

    On a terminal that is too narrow for it, each row becomes a block with one line per cell.
    """
    from rich.cells import cell_len

    cells = [["" if cell is None else printable(str(cell)) for cell in row] for row in rows]
    table = [list(columns), *cells]
    widths = [max(map(cell_len, column)) for column in zip(*table, strict=True)]
    if (
        sys.stdout.isatty()
        and sum(widths) + len(GAP) * (len(widths) - 1) > shutil.get_terminal_size().columns
    ):
        click.echo("\n\n".join(_block(columns, row) for row in cells))
        return
    for row in table:
        padded = (cell + " " * (width - cell_len(cell)) for cell, width in zip(row, widths, strict=True))
        click.echo(GAP.join(padded).rstrip())


def _block(columns: Sequence[str], row: Sequence[str]) -> str:
    width = max(map(len, columns))
    return "\n".join(
        f"{column:{width}}{GAP}{cell}" for column, cell in zip(columns, row, strict=True) if cell
    )


def printable(text: str) -> str:
    """A text with control characters escaped: a job's id may be any text."""
    return "".join(char if char.isprintable() else f"\\x{ord(char):02x}" for char in text)


def readable(data: bytes) -> str:
    """A body with control characters escaped, apart from line ends and tabs; bytes that are no UTF-8 too."""
    text = data.decode(errors="backslashreplace")
    return "".join(char if char in "\n\t" else printable(char) for char in text)


def size(count: int) -> str:
    """Bytes: `17 B`, `1.5 KiB`."""
    value, unit = float(count), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if value < 1024 or unit == "TiB":
            break
        value /= 1024
    return f"{value:.0f} B" if unit == "B" else f"{value:.1f} {unit}"


def span(seconds: float) -> str:
    """Seconds, in the two largest units: `3d4h`, `12m5s`, `0s`."""
    parts: list[str] = []
    rest = max(0.0, seconds)
    for length, unit in _UNITS:
        count, rest = divmod(rest, length)
        if count or parts:
            parts.append(f"{count:.0f}{unit}" if count else "")
        if len(parts) == 2:
            break
    return "".join(parts) or "0s"


def moment(time: dt.datetime) -> str:
    """A moment, to the second, in UTC."""
    return time.astimezone(dt.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
