"""Closed loops of streams: our Python client beside bare nats-py and, where it is installed, Dynamo.

    python -m benchmarks.loops [--peer PYTHON] [--seconds S] [--repeats N] [--streams N ...] [--readers R ...]

Every reader is a process of its own, and they take turns on one worker with a scripted engine, so that a
change of the machine meets all of them. `--peer` names the Python of an environment with `ai-dynamo-runtime`.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

import msgspec
from rich.console import Console

from benchmarks import machine, report
from benchmarks.load import LoadFailed
from benchmarks.looping import MODEL, TOKENS, Loop
from benchmarks.plane import BURSTS, SCRIPT
from benchmarks.report import Aim, Report, Spread
from inferbus.workers.observe import logs
from inferbus.workers.stack.errors import StackError
from inferbus.workers.stack.local import LocalStack
from inferbus.workers.stack.processes import spawn

STREAMS: Final = (1, 32, 256)
READERS: Final = ("client", "nats-py", "durable")
DYNAMO: Final = "dynamo"
PEER: Final = Path(__file__).with_name("peer.py")

WANTED_RATE: Final = 70_000
"""A second in one process of the client, from 32 streams on."""
WANTED_CLIENT: Final = 9.0
WANTED_WORKER: Final = {"step": 8.0, "burst": 5.0}
"""Microseconds of CPU a token."""
WANTED_FIRST: Final = 1.3
"""Times what bare nats-py takes to the first chunk of one stream."""
WANTED_FAIR: Final = 3.0
"""Times the median, for the 99th percentile of first chunks at 256 streams."""
START: Final = 60.0
"""Seconds that a reader may take beside its window."""


class Size(msgspec.Struct, frozen=True, kw_only=True):
    """How much is done.

    Attributes:
        repeats: Readings of every figure.
        seconds: Of one reading.
        streams: Open at a time.
        readers: Whose loops.
        peer: Python with Dynamo's runtime, if any.
    """

    repeats: int = 5
    seconds: float = 3.0
    streams: tuple[int, ...] = STREAMS
    readers: tuple[str, ...] = READERS
    peer: str | None = None


QUICK: Final = Size(repeats=1, seconds=1.0)


class Reading(msgspec.Struct, frozen=True, kw_only=True):
    """One reading of one reader."""

    reader: str
    pace: str
    streams: int
    loop: Loop


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the summary: CPU in microseconds a token, times in milliseconds.

    Attributes:
        ratio: Of tokens a second to Dynamo's, or to nats-py's where that did not run.
    """

    reader: str
    pace: str
    streams: int
    tokens_per_second: Spread
    reader_us: Spread
    worker_us: Spread
    first_p50: Spread | None
    first_p99: Spread | None
    ratio: float | None


async def measure(console: Console, *, quick: bool, size: Size | None = None) -> Report:
    """Takes all readings.

    Raises:
        LoadFailed: A reader failed.
    """
    size = size or (QUICK if quick else Size())
    taken, load_before, started = report.now(), machine.load(), time.monotonic()
    readings: list[Reading] = []
    async with _peer(console, size.peer) as peer:
        for pace, burst in BURSTS.items():
            with tempfile.TemporaryDirectory(prefix="inferbus-bench-") as folder:
                script = report.write(Path(folder, "script.toml"), SCRIPT.format(burst=burst))
                async with LocalStack("", model=MODEL, roles=("both",), scripted=script) as stack:
                    bench = _Bench(stack, pace, size, peer)
                    for number in range(size.repeats):
                        console.print(f"loops: {pace}, {number + 1} of {size.repeats}", style="dim")
                        readings += [each async for each in bench.round()]
    rows = list(_summary(readings))
    return Report(
        name="loops",
        quick=quick,
        taken=taken,
        seconds=round(time.monotonic() - started, 1),
        versions=machine.versions() | _peer_version(size.peer),
        machine=machine.Machine.here(),
        load_before=load_before,
        setup={
            "repeats": size.repeats,
            "seconds": size.seconds,
            "tokens_of_an_answer": TOKENS,
            "deltas_in_one_go": BURSTS,
        },
        summary=rows,
        aims=list(_aims(rows)),
        readings=readings,
    )


def show(console: Console, found: Report) -> None:
    """Prints the tables."""
    rows = [row for row in found.summary if isinstance(row, Row)]
    columns = ("streams", "tokens/s", "ratio", "reader us", "worker us", "first p50 ms", "p99 ms")
    for pace in BURSTS:
        lines = [
            (
                f"{row.streams} x {row.reader}",
                row.tokens_per_second.show(lambda value: f"{value:,.0f}"),
                "" if row.ratio is None else f"{row.ratio:.2f}",
                *(each.show(lambda value: f"{value:.1f}") for each in (row.reader_us, row.worker_us)),
                *(each.show(lambda value: f"{value:.2f}") if each else "" for each in _firsts(row)),
            )
            for row in rows
            if row.pace == pace
        ]
        console.print(report.table(f"closed loops, {pace}: median ±furthest", columns, lines))


class _Bench:
    def __init__(self, stack: LocalStack, pace: str, size: Size, peer: int | None) -> None:
        self._url, self._pace, self._size, self._peer = stack.url, pace, size, peer
        worker, server = next(iter(stack.workers.values())).pid, stack.server.child.pid
        self._processes = [f"worker={worker}", f"server={server}"]

    async def round(self) -> AsyncIterator[Reading]:
        """One reading of everything, the readers in turns."""
        for streams in self._size.streams:
            for reader in self._size.readers:
                yield await self._read(reader, streams)
            if self._peer is not None:
                yield await self._read(DYNAMO, streams)

    async def _read(self, reader: str, streams: int) -> Reading:
        figures = [str(streams), str(self._size.seconds)]
        if reader == DYNAMO:
            command = [str(self._size.peer), str(PEER), "loop", *figures, f"worker={self._peer}"]
        else:
            command = [
                sys.executable,
                "-m",
                "benchmarks.looping",
                reader,
                self._url,
                *figures,
                *self._processes,
            ]
        child = await asyncio.create_subprocess_exec(
            *command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=os.environ
        )
        try:
            async with asyncio.timeout(START + self._size.seconds):
                said, wrong = await child.communicate()
        except TimeoutError:
            child.kill()
            raise LoadFailed(f"{reader} with {streams} streams did not end") from None
        if child.returncode:
            raise LoadFailed(f"{reader} with {streams} streams: {wrong.decode()[-1000:]}")
        loop = msgspec.json.decode(said.splitlines()[-1], type=Loop)
        return Reading(reader=reader, pace=self._pace, streams=streams, loop=loop)


@asynccontextmanager
async def _peer(console: Console, python: str | None) -> AsyncIterator[int | None]:
    """Dynamo's worker, by its process id; None where it is not wanted or not installed."""
    if python is None or not _peer_version(python):
        if python is not None:
            console.print(f"{python} has no ai-dynamo-runtime; going on without Dynamo", style="yellow")
        yield None
        return
    with tempfile.TemporaryDirectory(prefix="inferbus-bench-") as folder:
        found = os.path.join(folder, "found")
        os.environ["DYN_FILE_KV"] = found

        async def announced() -> bool:
            return any(files for _, _, files in os.walk(found))

        child = await spawn(DYNAMO, [python, str(PEER), "worker"], log=Path(folder, "worker.log"))
        try:
            await child.until(announced, timeout=START)
            yield child.pid
        finally:
            await child.stop()


def _peer_version(python: str | None) -> dict[str, str]:
    """What is installed there; nothing where it is not."""
    if python is None:
        return {}
    ask = "import importlib.metadata as m; print(m.version('ai-dynamo-runtime'))"
    try:
        done = subprocess.run([python, "-c", ask], capture_output=True, text=True, check=True, timeout=START)
    except (OSError, subprocess.SubprocessError):
        return {}
    return {"ai-dynamo-runtime": done.stdout.strip()}


def _summary(readings: list[Reading]) -> Iterator[Row]:
    taken: dict[tuple[str, int, str], list[Loop]] = {}
    for each in readings:
        taken.setdefault((each.pace, each.streams, each.reader), []).append(each.loop)
    for (pace, streams, reader), mine in taken.items():
        against = taken.get((pace, streams, DYNAMO)) or taken.get((pace, streams, "nats-py"))
        rate, firsts = _rates(mine), [loop.first for loop in mine if loop.first is not None]
        yield Row(
            reader=reader,
            pace=pace,
            streams=streams,
            tokens_per_second=rate,
            reader_us=Spread.of([loop.reader_us for loop in mine]),
            worker_us=Spread.of([loop.cpu_us["worker"] for loop in mine]),
            first_p50=Spread.of([first.p50 for first in firsts]) if firsts else None,
            first_p99=Spread.of([first.p99 for first in firsts]) if firsts else None,
            ratio=None if against is None else round(rate.median / _rates(against).median, 2),
        )


def _firsts(row: Row) -> tuple[Spread | None, Spread | None]:
    return row.first_p50, row.first_p99


def _rates(loops: list[Loop]) -> Spread:
    return Spread.of([loop.tokens / loop.seconds for loop in loops])


def _aims(rows: list[Row]) -> Iterator[Aim]:
    by = {(row.reader, row.pace, row.streams): row for row in rows}
    for (reader, pace, streams), row in by.items():
        if reader != "client":
            continue
        where = f"{streams} streams, {pace}"
        if streams > 1:
            yield _at_least(f"tokens/s, {where}", row.tokens_per_second.median, WANTED_RATE)
            yield _at_most(f"client us a token, {where}", row.reader_us.median, WANTED_CLIENT)
            yield _at_most(f"worker us a token, {where}", row.worker_us.median, WANTED_WORKER[pace])
        elif (bare := by.get(("nats-py", pace, streams))) and row.first_p50 and bare.first_p50:
            ratio = row.first_p50.median / bare.first_p50.median
            yield _at_most(f"first chunk against bare nats-py, {where}", ratio, WANTED_FIRST)
        if streams == max(STREAMS) and row.first_p50 is not None and row.first_p99 is not None:
            ratio = row.first_p99.median / row.first_p50.median
            yield _at_most(f"first chunk, p99 against p50, {where}", ratio, WANTED_FAIR)


def _at_most(what: str, found: float, wanted: float) -> Aim:
    return Aim(what=what, wanted=f"at most {wanted:g}", found=f"{found:.2f}", met=found <= wanted)


def _at_least(what: str, found: float, wanted: float) -> Aim:
    return Aim(what=what, wanted=f"at least {wanted:,}", found=f"{found:,.0f}", met=found >= wanted)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures, prints, and writes the report; 1 where it could not be finished."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.loops", description="See benchmarks/README.md."
    )
    parser.add_argument("--peer", metavar="PYTHON", help="of an environment with ai-dynamo-runtime")
    parser.add_argument("--seconds", type=float, default=3.0, help="of one reading")
    parser.add_argument("--repeats", type=int, default=5, help="readings of every figure")
    parser.add_argument("--streams", type=int, nargs="+", default=list(STREAMS), help="open at a time")
    parser.add_argument("--readers", nargs="+", default=list(READERS), choices=READERS)
    parser.add_argument("--out", type=Path, default=report.RESULTS, metavar="DIR", help="for the JSON file")
    options = parser.parse_args(arguments)
    size = Size(
        repeats=options.repeats,
        seconds=options.seconds,
        streams=tuple(options.streams),
        readers=tuple(options.readers),
        peer=options.peer,
    )
    console = Console(width=120)
    logs.configure(level="ERROR", format="text")
    try:
        found = asyncio.run(measure(console, quick=False, size=size))
    except (LoadFailed, StackError) as error:
        console.print(f"loops failed: {error}", style="red", highlight=False)
        return 1
    show(console, found)
    report.show_aims(console, found.aims)
    console.print(f"written to {found.save(options.out)}", style="dim", highlight=False)
    return 0


if __name__ == "__main__":
    sys.exit(main())
