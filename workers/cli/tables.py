"""Tables, sizes and times for a terminal, without control characters from foreign names."""

from __future__ import annotations

import datetime as dt
import sys
from collections.abc import Iterable, Sequence
from typing import Final

_UNITS: Final = ((86400.0, "d"), (3600.0, "h"), (60.0, "m"), (1.0, "s"))


def print_table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Prints a table without lines; None is an empty cell."""
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*("" if cell is None else printable(str(cell)) for cell in row))
    # A pipe has no width; nothing should be folded there.
    Console(markup=False, highlight=False, width=None if sys.stdout.isatty() else 400).print(table)


def printable(text: str) -> str:
    """A text with control characters escaped: a job's id may be any text."""
    return "".join(char if char.isprintable() else f"\\x{ord(char):02x}" for char in text)


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
