"""What a benchmark found: a table for people, a file for whoever compares, and how it stands to its aims."""

from __future__ import annotations

import datetime as dt
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from benchmarks import machine

RESULTS = Path(__file__).parent / "results"


class Spread(msgspec.Struct, frozen=True):
    """Repeated readings of one figure."""

    median: float
    low: float
    high: float
    repeats: int

    @property
    def furthest(self) -> float:
        """Distance of the reading that is furthest from the median."""
        return max(self.high - self.median, self.median - self.low)

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """The spread of some readings, at least one."""
        return cls(statistics.median(values), min(values), max(values), len(values))

    def show(self, shown: Callable[[float], str]) -> str:
        """The median, and how far the readings are from it at most."""
        if self.repeats == 1:
            return shown(self.median)
        return f"{shown(self.median)} ±{shown(self.furthest).lstrip('+')}"


class Aim(msgspec.Struct, frozen=True, kw_only=True):
    """What a figure should be, and is."""

    what: str
    wanted: str
    found: str
    met: bool


class Report(msgspec.Struct, kw_only=True):
    """The outcome of one benchmark.

    Attributes:
        name: Of the benchmark.
        quick: Whether it was cut short; such figures are for trying the benchmark out.
        taken: When it began, UTC.
        seconds: How long it took.
        versions: Of all programs and packages that have a part in it.
        machine: What it ran on.
        load_before: Load averages before it began.
        setup: What else decides the figures: counts, flags, environment.
        summary: The figures, one row each.
        aims: How they stand to what was aimed at.
        readings: Every single reading.
    """

    name: str
    quick: bool
    taken: str
    seconds: float
    versions: dict[str, str]
    machine: machine.Machine
    load_before: list[float]
    setup: dict[str, Any]
    summary: list[Any]
    aims: list[Aim]
    readings: list[Any]

    def save(self, folder: Path) -> Path:
        """Writes `<name>-<date>.json`; a later run of the same day replaces it."""
        folder.mkdir(parents=True, exist_ok=True)
        name = f"{self.name}-quick" if self.quick else self.name
        path = folder / f"{name}-{self.taken[:10]}.json"
        path.write_bytes(msgspec.json.format(msgspec.json.encode(self), indent=1) + b"\n")
        return path


def now() -> str:
    """The time for `Report.taken`."""
    return dt.datetime.now(dt.UTC).isoformat(timespec="seconds")


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    """A table; the first column holds names, the others figures."""
    made = Table(title=title, title_justify="left")
    for index, column in enumerate(columns):
        made.add_column(column, justify="left" if index == 0 else "right")
    for row in rows:
        made.add_row(*row)
    return made


def show_aims(console: Console, aims: Sequence[Aim]) -> None:
    """Prints where the figures stand."""
    for aim in aims:
        mark = "[green]met[/]" if aim.met else "[yellow]falls short[/]"
        console.print(f"{mark}  {aim.what}: {aim.found} (aim: {aim.wanted})", highlight=False)


def write(path: Path, text: str) -> Path:
    """Writes a small file; returns its path."""
    path.write_text(text)
    return path
