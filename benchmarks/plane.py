"""The message plane alone: a worker with a scripted engine, a NATS server, and somebody who listens.

No model, no tokenizer, no delay: whatever time passes is spent by the worker's own code, by the server, and
by the listener. Two listeners are compared: a bare socket that only counts (`benchmarks.load`), so that
worker and server set the pace, and the Python client, as a program would use it.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final, Literal, get_args

import msgspec
from rich.console import Console

from benchmarks import echo, machine, report
from benchmarks.load import Tally, Wire, encode
from benchmarks.machine import Watch
from benchmarks.report import Aim, Report, Spread
from inferbus.schemas.subjects import Subjects
from inferbus.workers.client import Client
from inferbus.workers.stack.local import LocalStack
from inferbus.workers.stack.processes import spawn

MODEL: Final = "scripted"
STREAMS: Final = (1, 32, 256)
WANTED_CHUNKS: Final = 100_000
"""A second, from 32 streams on."""
WANTED_FIRST: Final = 0.5e-3
"""Seconds to the first chunk, on an idle system."""
PAUSE: Final = 0.005
"""Seconds between the requests of that measurement: the system is idle when the next one comes."""

Listener = Literal["socket", "client"]
LISTENERS: Final[tuple[Listener, ...]] = ("socket", "client")

Responder = Literal["worker", "nats-py"]

SCRIPT: Final = """
tokenizer = false
vocabulary = 32768
context_length = 1000000000
max_running = 1024
burst = {burst}
[[rules]]
count = [0, 32768]
length = 1000000000
"""
BURSTS: Final = {"burst": 16, "step": 1}
"""How many deltas of one stream come before the others have their turn. `burst` is what happens while a
worker is behind its engine, `step` what an engine does that is waited for: one delta a stream and step."""


class Size(msgspec.Struct, frozen=True, kw_only=True):
    """How much is done.

    Attributes:
        repeats: Readings of every figure.
        chunks: In one reading.
        client_chunks: In one reading of the Python client.
        firsts: Requests of one reading of the first chunk's time.
    """

    repeats: int
    chunks: int
    client_chunks: int
    firsts: int


FULL: Final = Size(repeats=5, chunks=204_800, client_chunks=51_200, firsts=600)
QUICK: Final = Size(repeats=3, chunks=51_200, client_chunks=12_800, firsts=100)


class Reading(msgspec.Struct, frozen=True, kw_only=True):
    """One reading: CPU in microseconds a chunk, `others` and `stolen` in cores."""

    listener: Listener
    pace: str
    streams: int
    chunks: int
    chunk_bytes: float
    seconds: float
    chunks_per_second: float
    worker_us: float
    server_us: float
    listener_us: float
    others: float
    stolen: float


class First(msgspec.Struct, frozen=True, kw_only=True):
    """One reading of the time from publishing a request to its first chunk, in seconds."""

    answered_by: Responder
    requests: int
    p50: float
    p99: float
    low: float
    others: float
    stolen: float


class FirstRow(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the summary of first chunks, in seconds."""

    answered_by: Responder
    p50: Spread
    p99: Spread
    low: Spread


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the summary."""

    listener: Listener
    pace: str
    streams: int
    chunks_per_second: Spread
    worker_us: Spread
    server_us: Spread
    listener_us: Spread


async def measure(console: Console, *, quick: bool) -> Report:
    """Takes all readings."""
    size = QUICK if quick else FULL
    taken, load_before, started = report.now(), machine.load(), time.monotonic()
    readings: list[Reading] = []
    firsts: list[First] = []
    for pace, burst in BURSTS.items():
        with tempfile.TemporaryDirectory(prefix="inferbus-bench-") as folder:
            script = report.write(Path(folder, "script.toml"), SCRIPT.format(burst=burst))
            async with LocalStack("", model=MODEL, roles=("both",), scripted=script) as stack:
                bench = _Bench(stack, pace)
                console.print(f"plane: worker and server are up, {pace}", style="dim")
                await bench.warm()
                if pace == "step":
                    firsts = await bench.firsts(size)
                for number in range(size.repeats):
                    console.print(f"plane: {pace}, reading {number + 1} of {size.repeats}", style="dim")
                    readings += [await bench.read(*each, size) for each in _order()]
    rows = list(_summary(readings))
    first = [_first(responder, firsts) for responder in get_args(Responder)]
    return Report(
        name="plane",
        quick=quick,
        taken=taken,
        seconds=round(time.monotonic() - started, 1),
        versions=machine.versions(),
        machine=machine.Machine.here(),
        load_before=load_before,
        setup={"size": size, "deltas_in_one_go": BURSTS, "pause": PAUSE, "kind": "tokens"},
        summary=[*rows, *first],
        aims=list(_aims(rows, first[0])),
        readings=[*readings, *firsts],
    )


def show(console: Console, found: Report) -> None:
    """Prints the tables."""
    rows = [row for row in found.summary if isinstance(row, Row)]
    for pace in BURSTS:
        lines = [
            (
                f"{row.streams} x {row.listener}",
                row.chunks_per_second.show(lambda value: f"{value:,.0f}"),
                *(each.show(lambda value: f"{value:.1f}") for each in _costs(row)),
            )
            for row in rows
            if row.pace == pace
        ]
        title = f"message plane, {pace}: median ±furthest; µs of CPU a chunk"
        columns = ("streams", "chunks/s", "worker", "server", "listener")
        console.print(report.table(title, columns, lines))
    lines = [
        (
            row.answered_by,
            *(each.show(lambda value: f"{value * 1e3:.3f}") for each in (row.p50, row.p99, row.low)),
        )
        for row in found.summary
        if isinstance(row, FirstRow)
    ]
    title = "first chunk, one stream, idle"
    console.print(report.table(title, ("answered by", "p50 ms", "p99 ms", "best ms"), lines))


class _Bench:
    def __init__(self, stack: LocalStack, pace: str) -> None:
        self._url = stack.url
        self._pace = pace
        self._subject = Subjects().request(MODEL, "tokens")
        worker, server = next(iter(stack.workers.values())).pid, stack.server.child.pid
        self._processes = {"worker": worker, "server": server}

    async def warm(self) -> None:
        """Lets every path run once."""
        await self._socket(32, 6400)
        await self._client(32, 3200)

    async def firsts(self, size: Size) -> list[First]:
        """The first chunk's time, from the worker and from nats-py alone, in turns."""
        readings: list[First] = []
        with tempfile.TemporaryDirectory(prefix="inferbus-bench-") as folder:
            log = Path(folder, "echo.log")

            async def listening() -> bool:
                return "listening" in await asyncio.to_thread(log.read_text)

            child = await spawn("echo", [sys.executable, "-m", "benchmarks.echo", self._url], log=log)
            try:
                await child.until(listening, timeout=30)
                for _ in range(size.repeats):
                    readings.append(await self._first("worker", self._subject, size.firsts))
                    readings.append(await self._first("nats-py", echo.SUBJECT, size.firsts))
            finally:
                await child.stop()
        return readings

    async def _first(self, responder: Responder, subject: str, requests: int) -> First:
        def run() -> Tally:
            with Wire(self._url) as wire:
                return wire.run(subject, [_body(1)] * requests, pause=PAUSE)

        with self._watch() as watch:
            tally = await asyncio.to_thread(run)
        ordered = sorted(tally.first)
        return First(
            answered_by=responder,
            requests=requests,
            p50=ordered[len(ordered) // 2],
            p99=ordered[int(len(ordered) * 0.99)],
            low=ordered[0],
            others=watch.others,
            stolen=watch.stolen,
        )

    async def read(self, listener: Listener, streams: int, size: Size) -> Reading:
        """One reading of throughput and costs."""
        chunks = size.chunks if listener == "socket" else size.client_chunks
        with self._watch() as watch:
            tally = await (self._socket if listener == "socket" else self._client)(streams, chunks)
        return Reading(
            listener=listener,
            pace=self._pace,
            streams=streams,
            chunks=tally.chunks,
            chunk_bytes=round(tally.bytes / tally.chunks, 1),
            seconds=tally.seconds,
            chunks_per_second=tally.chunks / tally.seconds,
            worker_us=watch.cpu["worker"] / tally.chunks * 1e6,
            server_us=watch.cpu["server"] / tally.chunks * 1e6,
            listener_us=tally.cpu / tally.chunks * 1e6,
            others=watch.others,
            stolen=watch.stolen,
        )

    def _watch(self) -> Watch:
        return Watch(self._processes, sessions=self._processes.values())

    async def _socket(self, streams: int, chunks: int) -> Tally:
        def run() -> Tally:
            with Wire(self._url) as wire:
                bodies = [_body(chunks // streams)] * streams
                return wire.run(self._subject, bodies, concurrency=streams)

        return await asyncio.to_thread(run)

    async def _client(self, streams: int, chunks: int) -> Tally:
        tally = Tally()

        async def listen(client: Client) -> None:
            async for _ in client.tokens(MODEL, [1], max_tokens=chunks // streams):
                tally.chunks += 1

        async with Client.connect(self._url) as client:
            cpu, started = time.process_time(), time.perf_counter()
            async with asyncio.TaskGroup() as group:
                for _ in range(streams):
                    group.create_task(listen(client))
            tally.seconds = time.perf_counter() - started
            tally.cpu = time.process_time() - cpu
        return tally


def _order() -> Iterator[tuple[Listener, int]]:
    """Listeners take turns, so that a change of the machine meets both."""
    for streams in STREAMS:
        for listener in LISTENERS:
            yield listener, streams


def _body(tokens: int) -> bytes:
    return encode({"token_ids": [1], "max_tokens": tokens})


def _costs(row: Row) -> tuple[Spread, Spread, Spread]:
    return row.worker_us, row.server_us, row.listener_us


def _summary(readings: list[Reading]) -> Iterator[Row]:
    for pace in BURSTS:
        for listener, streams in _order():
            mine = [
                each
                for each in readings
                if (each.pace, each.listener, each.streams) == (pace, listener, streams)
            ]
            yield Row(
                listener=listener,
                pace=pace,
                streams=streams,
                chunks_per_second=Spread.of([each.chunks_per_second for each in mine]),
                worker_us=Spread.of([each.worker_us for each in mine]),
                server_us=Spread.of([each.server_us for each in mine]),
                listener_us=Spread.of([each.listener_us for each in mine]),
            )


def _first(responder: Responder, readings: list[First]) -> FirstRow:
    mine = [each for each in readings if each.answered_by == responder]
    return FirstRow(
        answered_by=responder,
        p50=Spread.of([each.p50 for each in mine]),
        p99=Spread.of([each.p99 for each in mine]),
        low=Spread.of([each.low for each in mine]),
    )


def _aims(rows: list[Row], first: FirstRow) -> Iterator[Aim]:
    for row in rows:
        if row.listener == "socket" and row.pace == "burst" and row.streams > 1:
            found = row.chunks_per_second.median
            yield Aim(
                what=f"chunks/s at {row.streams} streams",
                wanted=f"at least {WANTED_CHUNKS:,}",
                found=f"{found:,.0f}",
                met=found >= WANTED_CHUNKS,
            )
    median = first.p50.median
    yield Aim(
        what="first chunk, median",
        wanted=f"within {WANTED_FIRST * 1e3:g} ms",
        found=f"{median * 1e3:.2f} ms",
        met=median <= WANTED_FIRST,
    )
