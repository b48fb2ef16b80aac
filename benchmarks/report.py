"""What a benchmark found: a table for people, a file for whoever compares, and how it stands to its aims."""

from __future__ import annotations

import datetime as dt
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from statistics import fmean
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


class Quantiles(msgspec.Struct, frozen=True, kw_only=True):
    """Of a duration, in milliseconds."""

    n: int
    mean: float
    p50: float
    p90: float
    p99: float

    @classmethod
    def of(cls, seconds: Iterable[float]) -> Quantiles | None:
        """The quantiles of some durations; None if there are none."""
        found = sorted(seconds)
        if not found:
            return None

        def at(share: float) -> float:
            return round(found[min(len(found) - 1, int(len(found) * share))] * 1e3, 3)

        mean = round(fmean(found) * 1e3, 3)
        return cls(n=len(found), mean=mean, p50=at(0.5), p90=at(0.9), p99=at(0.99))


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


class Draft:
    """A report that grows while a program measures, for programs that may be ended at any moment.

    Args:
        name: Of the benchmark.
        folder: Where it is written.
        quick: See `Report`.

    Attributes:
        machine: What this runs on.
        readings: So far.
        summary: So far.
        notes: What people should know of this run.
    """

    def __init__(self, name: str, folder: Path, *, quick: bool = False) -> None:
        self.machine = machine.Machine.here()
        self.readings: list[Any] = []
        self.summary: list[Any] = []
        self.notes: list[str] = []
        self._name = name
        self._folder = folder
        self._quick = quick
        self._taken, self._started = now(), time.monotonic()
        self._load, self._versions = machine.load(), machine.versions()

    def say(self, line: str) -> None:
        """Tells where the program is."""
        print(f"{time.monotonic() - self._started:6.1f} s  {line}", flush=True)

    def note(self, line: str) -> None:
        """Says it in the report as well."""
        self.notes.append(line)
        self.say(line)

    def save(self, setup: dict[str, Any]) -> Path:
        """Writes what there is so far."""
        done = Report(
            name=self._name,
            quick=self._quick,
            taken=self._taken,
            seconds=round(time.monotonic() - self._started, 1),
            versions=self._versions,
            machine=self.machine,
            load_before=self._load,
            setup={**setup, "notes": self.notes},
            summary=self.summary,
            aims=[],
            readings=self.readings,
        )
        return done.save(self._folder)


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
