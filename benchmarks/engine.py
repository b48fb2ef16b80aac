"""A worker over NATS against the bare engine inside it: the same requests, one engine at a time, in turns.

`bare` is `sgl.Engine` with nothing around it (`benchmarks.bare`); `both` is one worker behind an embedded
NATS server; `pair`, for information, a prefill and a decode worker on the same machine, two engines where the
others have one. Each round starts every layout anew, so that a slow drift of the machine meets all of them;
figures of one round are compared with each other before rounds are.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any, Final, Literal

import msgspec
from rich.console import Console

from benchmarks import machine, report
from benchmarks.load import LoadFailed, Wire, encode
from benchmarks.machine import Watch
from benchmarks.report import Aim, Report, Spread
from benchmarks.workload import KINDS, Kind, Plan, Reading, Shape
from inferbus.schemas.fleet import Role
from inferbus.schemas.subjects import Subjects
from inferbus.workers.stack import models
from inferbus.workers.stack.errors import StackError
from inferbus.workers.stack.flags import Placement, placement
from inferbus.workers.stack.local import LocalStack
from inferbus.workers.stack.processes import spawn
from inferbus.workers.stack.server import HOST

MODEL: Final = "tiny"
WANTED_RATIO: Final = 0.97
WANTED_ADDED: Final = 1e-3
"""Seconds added to the first token of a request that is alone."""
CONCURRENCY: Final = (1, 8, 32)
THREADS: Final = {"OMP_NUM_THREADS": "1", "SGLANG_CPU_OMP_THREADS_BIND": "0"}
"""One compute thread for every engine. With PyTorch's own choice, all cores, the engine takes the core that
the load generator and NATS need, and the figures tell how they fight for it."""
BARE_SECONDS: Final = 3600.0

Layout = Literal["bare", "both", "pair"]
ROLES: Final[dict[Layout, tuple[Role, ...]]] = {"both": ("both",), "pair": ("prefill", "decode")}


class Size(msgspec.Struct, frozen=True, kw_only=True):
    """How much is done.

    Attributes:
        rounds: Lives of each engine that are compared.
        pair_rounds: Lives of the pair.
        passes: Readings of every figure in one life.
        requests: In one reading, for each of `CONCURRENCY`.
    """

    rounds: int
    pair_rounds: int
    passes: int
    requests: tuple[int, ...]

    def plan(self) -> Plan:
        """For one engine."""
        shapes = [
            Shape(kind=kind, concurrency=concurrency, requests=requests)
            for kind in KINDS
            for concurrency, requests in zip(CONCURRENCY, self.requests, strict=True)
        ]
        return Plan(passes=self.passes, shapes=shapes)


FULL: Final = Size(rounds=3, pair_rounds=1, passes=3, requests=(16, 64, 256))
QUICK: Final = Size(rounds=1, pair_rounds=1, passes=1, requests=(4, 16, 64))


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of one layout; seconds, tokens a second, microseconds of CPU a token."""

    layout: Layout
    kind: Kind
    concurrency: int
    rate: Spread
    first: Spread
    main_us: Spread
    messages_per_token: float


class Compared(msgspec.Struct, frozen=True, kw_only=True):
    """One layout against the bare engine, round by round.

    Attributes:
        layout: Which.
        kind: Of the requests.
        concurrency: Requests open at a time.
        ratio: Of the throughputs.
        added: Seconds that come on top of the median time to the first token.
        main_us: CPU that comes on top in the engine's process, microseconds a token.
    """

    layout: Layout
    kind: Kind
    concurrency: int
    ratio: Spread
    added: Spread
    main_us: Spread


async def measure(console: Console, *, quick: bool) -> Report:
    """Takes all readings."""
    size = QUICK if quick else FULL
    taken, load_before, started = report.now(), machine.load(), time.monotonic()
    bench = _Bench(size.plan(), await asyncio.to_thread(placement), str(models.ensure("tiny")))
    readings: list[Reading] = []
    for number in range(size.rounds):
        for layout in ("bare", "both", "pair"):
            if layout == "pair" and number >= size.pair_rounds:
                continue
            console.print(f"engine: round {number + 1} of {size.rounds}, {layout}", style="dim")
            try:
                found = await (bench.bare() if layout == "bare" else bench.behind_nats(layout))
            except LoadFailed as error:
                if layout != "pair":
                    raise
                # Its figures are for information; the others stand without them.
                console.print(f"no figures of the pair: {error}", style="yellow", highlight=False)
                continue
            readings += [msgspec.structs.replace(each, round=number) for each in found]
    rows, compared = list(_rows(readings)), list(_compare(readings))
    return Report(
        name="engine",
        quick=quick,
        taken=taken,
        seconds=round(time.monotonic() - started, 1),
        versions=machine.versions(),
        machine=machine.Machine.here(),
        load_before=load_before,
        setup=bench.setup() | {"size": size},
        summary=[*compared, *rows],
        aims=list(_aims(compared)),
        readings=readings,
    )


def show(console: Console, found: Report) -> None:
    """Prints the tables."""
    compared = [row for row in found.summary if isinstance(row, Compared)]
    for layout in ("both", "pair"):
        lines = [
            (
                f"{each.kind}, {each.concurrency} at a time",
                each.ratio.show(lambda value: f"{value:.3f}"),
                each.added.show(lambda value: f"{value * 1e3:+.2f}"),
                each.main_us.show(lambda value: f"{value:+.1f}"),
            )
            for each in compared
            if each.layout == layout
        ]
        title = f"{layout}, against the bare engine: median ±furthest of the rounds"
        columns = ("", "throughput ratio", "added to first token, ms", "added CPU, µs/token")
        console.print(report.table(title, columns, lines))
    lines = [
        (
            f"{row.layout}, {row.kind}, {row.concurrency} at a time",
            row.rate.show(lambda value: f"{value:,.0f}"),
            row.first.show(lambda value: f"{value * 1e3:.1f}"),
            row.main_us.show(lambda value: f"{value:.0f}"),
        )
        for row in found.summary
        if isinstance(row, Row)
    ]
    console.print(report.table("all layouts", ("", "tokens/s", "first token ms", "CPU µs/token"), lines))


class _Bench:
    """Runs a plan on a layout."""

    def __init__(self, plan: Plan, place: Placement, model: str) -> None:
        self._plan = plan
        self._place = place
        self._model = model
        self._env = {**place.env, **THREADS, "SGLANG_HOST_IP": HOST}

    def setup(self) -> dict[str, Any]:
        """What decides the figures."""
        return {
            "where": self._place.where,
            "flags": self._place.flags,
            "environment": THREADS,
            "plan": self._plan,
            "bare": "tokens: Engine.async_generate; chat: OpenAIServingChat.handle_request; uvloop",
        }

    async def bare(self) -> list[Reading]:
        """The bare engine, in a process of its own."""
        with tempfile.TemporaryDirectory(prefix="inferbus-bench-") as folder:
            plan, out, log = (Path(folder, name) for name in ("plan.json", "out.json", "bare.log"))
            plan.write_bytes(msgspec.json.encode(self._plan))
            command = [sys.executable, "-m", "benchmarks.bare", str(plan), str(out), MODEL]
            command += ["--model-path", self._model, "--host", HOST, *self._place.flags]
            child = await spawn("bare engine", command, log=log, env=self._env)
            try:
                async with asyncio.timeout(BARE_SECONDS):
                    code = await child.wait()
                if not out.exists():
                    raise StackError(f"the bare engine ended with {code}:\n" + "\n".join(child.tail()))
                return msgspec.json.decode(out.read_bytes(), type=list[Reading])
            finally:
                await child.stop()

    async def behind_nats(self, layout: Layout) -> list[Reading]:
        """Workers and a server."""
        roles = ROLES[layout]
        stack = LocalStack(
            self._model,
            model=MODEL,
            roles=roles,
            flags=self._place.flags,
            role_flags=self._place.role_flags,
            env=self._env,
        )
        async with stack:
            with Wire(stack.url) as wire:
                return await asyncio.to_thread(self._drive, layout, stack, wire)

    def _drive(self, layout: Layout, stack: LocalStack, wire: Wire) -> list[Reading]:
        # The last role is the one that owns requests.
        main = list(stack.workers.values())[-1].pid
        sessions = [stack.server.child.pid, *(child.pid for child in stack.workers.values())]
        plan = self._plan

        def reading(shape: Shape, number: int) -> Reading:
            bodies = [encode(body) for body in plan.bodies(shape, number)]
            subject = Subjects().request(MODEL, shape.kind)
            with Watch({"main": main}, sessions=sessions) as watch:
                tally = wire.run(subject, bodies, concurrency=shape.concurrency)
            tokens = shape.requests * plan.answer
            return Reading(
                layout=layout,
                round=0,
                number=number,
                kind=shape.kind,
                concurrency=shape.concurrency,
                requests=shape.requests,
                tokens=tokens,
                messages=tally.chunks,
                seconds=tally.seconds,
                first=tally.first,
                main_us=watch.cpu["main"] / tokens * 1e6,
                others=watch.others,
                stolen=watch.stolen,
            )

        for shape in plan.warming():
            reading(shape, -1)
        return [reading(shape, number) for number in range(plan.passes) for shape in plan.shapes]


def _shapes() -> Iterator[tuple[Kind, int]]:
    for kind in KINDS:
        for concurrency in CONCURRENCY:
            yield kind, concurrency


def _of(readings: list[Reading], layout: Layout, kind: Kind, concurrency: int) -> list[Reading]:
    wanted = (layout, kind, concurrency)
    return [each for each in readings if (each.layout, each.kind, each.concurrency) == wanted]


def _rows(readings: list[Reading]) -> Iterator[Row]:
    layouts: tuple[Layout, ...] = ("bare", "both", "pair")
    for layout in layouts:
        for kind, concurrency in _shapes():
            if mine := _of(readings, layout, kind, concurrency):
                yield Row(
                    layout=layout,
                    kind=kind,
                    concurrency=concurrency,
                    rate=Spread.of([each.rate for each in mine]),
                    first=Spread.of([median(each.first) for each in mine]),
                    main_us=Spread.of([each.main_us for each in mine]),
                    messages_per_token=sum(each.messages for each in mine)
                    / sum(each.tokens for each in mine),
                )


def _compare(readings: list[Reading]) -> Iterator[Compared]:
    for layout in ROLES:
        for kind, concurrency in _shapes():
            mine = _of(readings, layout, kind, concurrency)
            bare = _of(readings, "bare", kind, concurrency)
            pairs = [
                ([each for each in mine if each.round == number], [e for e in bare if e.round == number])
                for number in sorted({each.round for each in mine})
            ]
            if pairs:
                yield Compared(
                    layout=layout,
                    kind=kind,
                    concurrency=concurrency,
                    ratio=Spread.of([_rate(ours) / _rate(theirs) for ours, theirs in pairs]),
                    added=Spread.of([_first(ours) - _first(theirs) for ours, theirs in pairs]),
                    main_us=Spread.of([_main(ours) - _main(theirs) for ours, theirs in pairs]),
                )


def _rate(readings: list[Reading]) -> float:
    return median(each.rate for each in readings)


def _first(readings: list[Reading]) -> float:
    return median(seconds for each in readings for seconds in each.first)


def _main(readings: list[Reading]) -> float:
    return median(each.main_us for each in readings)


def _aims(compared: list[Compared]) -> Iterator[Aim]:
    for each in compared:
        if each.layout != "both":
            continue
        yield Aim(
            what=f"throughput, {each.kind}, {each.concurrency} at a time",
            wanted=f"at least {WANTED_RATIO} of the bare engine's",
            found=f"{each.ratio.median:.3f}",
            met=each.ratio.median >= WANTED_RATIO,
        )
        if each.concurrency == 1:
            yield Aim(
                what=f"first token, {each.kind}",
                wanted=f"at most {WANTED_ADDED * 1e3:g} ms added",
                found=f"{each.added.median * 1e3:+.2f} ms",
                met=each.added.median <= WANTED_ADDED,
            )
