"""Batch files against a plain client: `python -m benchmarks.batch [--lines N ...] [--workers N]`.

The engines are scripted and answer at once, so what is measured is the message plane: submission, bundles,
results, output files, each synced (`sync_interval: always`). Beside it, in the same run, a loop over live
requests with `asyncio.gather` and a semaphore, which stores nothing. With `--seconds` a line takes as long as
with a real engine, and what is measured is whether one submitter keeps all workers busy.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, Final, Literal

import msgspec
from rich.console import Console

from benchmarks import machine, report
from benchmarks.machine import Watch
from benchmarks.report import Aim, Report
from inferbus.schemas.fleet import Role
from inferbus.workers.client import Client
from inferbus.workers.stack.errors import StackError
from inferbus.workers.stack.local import LocalStack
from inferbus.workers.stack.processes import Child, spawn

MODEL: Final = "scripted"
SIZES: Final = (10_000, 100_000)
QUICK: Final = (1000, 4000)
PLAIN_LINES: Final = 5000
"""Requests of the plain loop, which keeps them all in memory."""

PROMPT: Final = 64
"""Token ids of a prompt."""

LOOK_EVERY: Final = 0.25
"""Seconds between two looks at memory and disk."""

RESUME_WITHIN: Final = 1800.0
MIB: Final = 1024 * 1024

WANTED_CLIENT_MIB: Final = 300
WANTED_RESUME: Final = 10.0
"""Seconds from the start of the command after a SIGKILL to its first new line."""

GROWTH: Final = 0.7
"""A line of the largest batch may cost so much more than one of the smallest: 1 / 0.7."""

SERVER_MIB: Final = 32
"""Memory that a server may have more after the largest batch than after the smallest."""

Way = Literal["gather", "batch", "shared", "killed"]

SLOTS: Final = 256
"""Of a worker."""

LIVE_SHARE: Final = 0.25
"""Of the slots, which jobs leave to live requests: the setting's default."""

BUSY: Final = 0.95
"""Of the slots that jobs may have, from the first line to the last, where lines take a while."""

_SCRIPT: Final = """\
tokenizer = false
vocabulary = 32768
max_running = {slots}
[[rules]]
length = 16
per_delta = 16
first_delay = {seconds}
"""
_CHILD: Final = """
import asyncio, json, resource, sys, time
from pathlib import Path
from inferbus.workers.batch.runs import Options, begin, run
from inferbus.workers.client import Client
async def main(url, source, shared):
    async with Client.connect(url) as client:
        began = time.monotonic()
        begun = await begin(client, Path(source), Options(shared=bool(shared)))
        checked = time.monotonic()
        record = await run(client, begun)
        ended = time.monotonic()
    used = resource.getrusage(resource.RUSAGE_SELF)
    print(json.dumps({"checking": checked - began, "running": ended - checked,
        "succeeded": record.counts.succeeded, "cpu": used.ru_utime + used.ru_stime,
        "peak_mib": used.ru_maxrss / 1024}))
asyncio.run(main(*sys.argv[1:]))
"""


class Reading(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One way of doing so many lines. Times are seconds, sizes MiB, `others` and `stolen` cores.

    Attributes:
        way: `gather` is the plain loop; `killed` a batch whose submitter gets SIGKILL at half of its lines.
        checking: The whole file, before anything is submitted.
        running: From the first submission to the finished output.
        cpu, peak_mib: Of the client, which is a process of its own, except that of the plain loop.
        server_before_mib, server_peak_mib, server_after_mib: Resident memory of the NATS server.
        store_peak_mib, store_after_mib: What it has on disk.
        first_new: Of `killed`: from the start of the same command to its first new line.
        again: Of `killed`: lines that were written twice.
    """

    way: Way
    lines: int
    running: float
    lines_per_second: float
    cpu: float
    checking: float = 0.0
    peak_mib: float = 0.0
    server_before_mib: float = 0.0
    server_peak_mib: float = 0.0
    server_after_mib: float = 0.0
    store_peak_mib: float = 0.0
    store_after_mib: float = 0.0
    first_new: float | None = None
    again: int | None = None
    others: float = 0.0
    stolen: float = 0.0


class _Told(msgspec.Struct):
    """What a client says of itself at its end."""

    checking: float
    running: float
    succeeded: int
    cpu: float
    peak_mib: float


async def measure(
    console: Console,
    *,
    quick: bool,
    sizes: Sequence[int] = (),
    workers: int = 1,
    prompt: int = PROMPT,
    shared: bool = False,
    slots: int = SLOTS,
    seconds: float = 0.0,
) -> Report:
    """One reading for each size, the plain loop first, a killed submitter last.

    Args:
        console: Says where it is.
        quick: Small sizes.
        sizes: Lines of a batch; none: the usual ones.
        workers: Scripted workers.
        prompt: Token ids of a prompt.
        shared: Measure batches that are shared as well.
        slots: Requests that a worker takes at once.
        seconds: That a line takes in a worker.
    """
    sizes = sizes or (QUICK if quick else SIZES)
    taken, load_before, started = report.now(), machine.load(), time.monotonic()
    readings: list[Reading] = []
    roles: list[Role] = ["both"] * workers
    possible = workers * (slots - round(slots * LIVE_SHARE)) / seconds if seconds else None
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="inferbus-bench-")))
        scripted = _SCRIPT.format(slots=slots, seconds=float(seconds))
        script = report.write(folder / "script.toml", scripted)
        bench = _Bench(
            await stack.enter_async_context(LocalStack("", model=MODEL, roles=roles, scripted=script)),
            folder,
            prompt,
        )
        console.print("batch: workers and server are up", style="dim")
        # It is no match for workers that take a while.
        readings.append(await bench.plain(QUICK[0] if quick or possible else PLAIN_LINES))
        ways: list[Way] = ["batch", "shared"] if shared else ["batch"]
        for lines in sizes:
            for way in ways:
                console.print(f"batch: {way} of {lines} lines", style="dim", highlight=False)
                readings.append(await bench.whole(way, lines))
        console.print(f"batch: killed at half of {max(sizes)} lines", style="dim", highlight=False)
        readings.append(await bench.killed(max(sizes)))
    return Report(
        name="batch",
        quick=quick,
        taken=taken,
        seconds=round(time.monotonic() - started, 1),
        versions=machine.versions(),
        machine=machine.Machine.here(),
        load_before=load_before,
        setup={"workers": workers, "prompt": prompt, "answer": 16, "script": scripted},
        summary=readings,
        aims=list(_aims(readings, possible)),
        readings=readings,
    )


def show(console: Console, found: Report) -> None:
    """Prints the table."""
    rows = [
        (
            f"{row.way} {row.lines:,}",
            f"{row.lines_per_second:,.0f}",
            f"{row.checking:.1f}",
            f"{row.cpu:.1f}",
            *(_row(*sizes) for sizes in _sizes(row)),
            "" if row.first_new is None else f"{row.first_new:.1f}",
        )
        for row in found.summary
    ]
    columns = ("lines", "lines/s", "check s", "CPU s", "client", "server", "store", "new s")
    title = "batch: client's CPU; MiB of client, server (before, peak, after), its store (peak, after)"
    console.print(report.table(title, columns, rows))


def _sizes(row: Reading) -> tuple[tuple[float, ...], ...]:
    if row.way == "gather":
        return ((), (), ())
    server = (row.server_before_mib, row.server_peak_mib, row.server_after_mib)
    return ((row.peak_mib,), server, (row.store_peak_mib, row.store_after_mib))


def _row(*sizes: float) -> str:
    return " ".join(f"{size:.0f}" for size in sizes)


class _Bench:
    def __init__(self, stack: LocalStack, folder: Path, prompt: int) -> None:
        self._stack = stack
        self._folder = folder
        self._prompt = prompt
        self._server = stack.server.child.pid
        self._sessions = [self._server, *(worker.pid for worker in stack.workers.values())]

    async def plain(self, lines: int) -> Reading:
        """The loop that people write: a semaphore, gather, and a list of answers."""
        slots = asyncio.Semaphore(64)
        async with Client.connect(self._stack.url) as client:

            async def one(number: int) -> Any:
                async with slots:
                    return await client.tokens(MODEL, self._ids(number), max_tokens=16, stream=False)

            with Watch({"client": os.getpid()}, sessions=self._sessions) as watch:
                await asyncio.gather(*map(one, range(lines)))
        return Reading(
            way="gather",
            lines=lines,
            running=watch.seconds,
            lines_per_second=lines / watch.seconds,
            cpu=watch.cpu["client"],
            others=watch.others,
            stolen=watch.stolen,
        )

    async def whole(self, way: Way, lines: int) -> Reading:
        """A batch that nothing disturbs."""
        source = await asyncio.to_thread(self._write, f"{way}-{lines}", lines)
        before = self._resident()
        child = await self._start(source, way)
        return await self._read(child, way, lines, ran=lines, before=before)

    async def killed(self, lines: int) -> Reading:
        """A batch whose submitter is killed after half of its lines; the same command goes on."""
        source = await asyncio.to_thread(self._write, f"killed-{lines}", lines)
        output = source.with_name(f"{source.stem}.output.jsonl")
        partial = output.with_name(f"{output.name}.partial")
        before = self._resident()

        async def more(than: int) -> bool:
            return await asyncio.to_thread(_count, partial if partial.exists() else output) > than

        child = await self._start(source, "killed")
        await child.until(lambda: more(lines // 2), timeout=RESUME_WITHIN)
        os.kill(child.pid, signal.SIGKILL)
        await child.wait()
        there = await asyncio.to_thread(_count, partial)
        began = time.monotonic()
        child = await self._start(source, "killed")
        await child.until(lambda: more(there), timeout=RESUME_WITHIN, poll=0.05)
        first_new = time.monotonic() - began
        reading = await self._read(child, "killed", lines, ran=lines - there, before=before)
        again = await asyncio.to_thread(_again, output)
        return msgspec.structs.replace(reading, first_new=first_new, again=again)

    async def _read(self, child: Child, way: Way, lines: int, *, ran: int, before: float) -> Reading:
        """Watches a batch until it has ended.

        Args:
            child: Its process.
            way: Name of the reading.
            lines: Of the batch.
            ran: How many of them this process runs.
            before: The server's memory before it, in MiB.
        """
        with Watch({}, sessions=[*self._sessions, child.pid]) as watch:
            peak, disk = await self._watched(child)
        told = await self._told(child, lines)
        return Reading(
            way=way,
            lines=lines,
            checking=told.checking,
            running=told.running,
            lines_per_second=ran / told.running,
            cpu=told.cpu,
            peak_mib=told.peak_mib,
            server_before_mib=before,
            server_peak_mib=peak,
            server_after_mib=self._resident(),
            store_peak_mib=disk,
            store_after_mib=await self._store(),
            others=watch.others,
            stolen=watch.stolen,
        )

    async def _start(self, source: Path, way: Way) -> Child:
        command = [sys.executable, "-c", _CHILD, self._stack.url, str(source), "shared" * (way == "shared")]
        return await spawn("batch", command, log=source.with_suffix(".log"))

    async def _watched(self, child: Child) -> tuple[float, float]:
        """The most that the server had in memory and on disk until a client ended."""
        peak, disk = self._resident(), 0.0
        waiting = asyncio.ensure_future(child.wait())
        while not waiting.done():
            peak, disk = max(peak, self._resident()), max(disk, await self._store())
            await asyncio.wait({waiting}, timeout=LOOK_EVERY)
        return peak, disk

    async def _told(self, child: Child, lines: int) -> _Told:
        if child.returncode:
            raise child.exited()
        found = msgspec.json.decode(child.tail(1)[0], type=_Told)
        if found.succeeded != lines:
            raise child.exited()
        return found

    def _write(self, name: str, lines: int) -> Path:
        path = self._folder / f"{name}.jsonl"
        with path.open("wb") as file:
            file.writelines(map(self._line, range(lines)))
        return path

    def _line(self, number: int) -> bytes:
        body = {"model": MODEL, "token_ids": self._ids(number), "max_tokens": 16}
        line = {"custom_id": f"line-{number}", "method": "POST", "url": "/v1/tokens", "body": body}
        return msgspec.json.encode(line) + b"\n"

    def _ids(self, number: int) -> list[int]:
        return [number % 30000] * self._prompt

    def _resident(self) -> float:
        return machine.memory(self._server).resident / MIB

    async def _store(self) -> float:
        return await asyncio.to_thread(_size, self._stack.server.store) / MIB


def _size(folder: Path) -> int:
    total = 0
    for root, _, names in os.walk(folder):
        for name in names:
            try:
                total += (Path(root) / name).stat().st_size
            except FileNotFoundError:
                continue  # The server has removed it meanwhile.
    return total


def _count(path: Path) -> int:
    """Whole lines of a growing file; none while it is not there."""
    try:
        with path.open("rb") as file:
            return sum(data.count(b"\n") for data in iter(lambda: file.read(MIB), b""))
    except FileNotFoundError:
        return 0


class _Line(msgspec.Struct):
    custom_id: str


def _again(output: Path) -> int:
    """Lines of an output whose ids it has already."""
    decode = msgspec.json.Decoder(_Line).decode
    with output.open("rb") as file:
        ids = [decode(line).custom_id for line in file]
    return len(ids) - len(set(ids))


def _aims(readings: Sequence[Reading], possible: float | None) -> list[Aim]:
    """How the readings stand; `possible` lines/s are those of workers that are busy all the time."""
    plain = readings[0]
    (killed,) = (each for each in readings if each.way == "killed")
    ordered = sorted((each for each in readings if each.way == "batch"), key=lambda each: each.lines)
    small, large = ordered[0], ordered[-1]
    peak = max(each.peak_mib for each in readings)
    growth = large.lines_per_second / small.lines_per_second
    more = large.server_after_mib - small.server_after_mib
    ratio = large.lines_per_second / plain.lines_per_second
    assert killed.first_new is not None
    if possible is None:
        what, found, wanted = "asyncio.gather over live requests, which store nothing", ratio, 1.0
    else:
        what, found, wanted = "workers that are busy all the time", large.lines_per_second / possible, BUSY
    return [
        Aim(
            what="memory of the client",
            wanted=f"{WANTED_CLIENT_MIB} MiB at most",
            found=f"{peak:.0f} MiB",
            met=peak <= WANTED_CLIENT_MIB,
        ),
        Aim(
            what=f"lines/s of {large.lines:,} lines to those of {small.lines:,}",
            wanted=f"{GROWTH:g} at least",
            found=f"{growth:.2f}",
            met=growth >= GROWTH,
        ),
        Aim(
            what=f"memory of the server after {large.lines:,} lines, beside that after {small.lines:,}",
            wanted=f"{SERVER_MIB} MiB more at most",
            found=f"{more:+.0f} MiB",
            met=more <= SERVER_MIB,
        ),
        Aim(
            what="first new line after SIGKILL, no line again",
            wanted=f"{WANTED_RESUME:g} s at most, 0",
            found=f"{killed.first_new:.1f} s, {killed.again}",
            met=killed.first_new <= WANTED_RESUME and not killed.again,
        ),
        Aim(
            what=f"lines/s to those of {what}",
            wanted=f"{wanted:g} at least",
            found=f"{found:.3f}",
            met=found >= wanted,
        ),
    ]


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.batch", description=__doc__)
    parser.add_argument("--lines", type=int, nargs="+", default=SIZES)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--prompt", type=int, default=PROMPT, help="token ids of a prompt")
    parser.add_argument("--slots", type=int, default=SLOTS, help="requests that a worker takes at once")
    parser.add_argument("--seconds", type=float, default=0.0, help="that a line takes in a worker")
    parser.add_argument("--shared", action="store_true", help="measure batches that are shared as well")
    parser.add_argument("--out", type=Path, default=report.RESULTS, metavar="DIR", help="for the JSON file")
    arguments = parser.parse_args()
    console = Console()
    measuring = measure(
        console,
        quick=False,
        sizes=arguments.lines,
        workers=arguments.workers,
        prompt=arguments.prompt,
        shared=arguments.shared,
        slots=arguments.slots,
        seconds=arguments.seconds,
    )
    try:
        found = asyncio.run(measuring)
    except StackError as error:
        console.print(f"batch failed: {error}", style="red", highlight=False)
        return 1
    show(console, found)
    report.show_aims(console, found.aims)
    console.print(f"written to {found.save(arguments.out)}", style="dim", highlight=False)
    return 0


if __name__ == "__main__":
    sys.exit(main())
