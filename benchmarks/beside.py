"""Live requests beside a batch that fills the engine: what each costs the other.

    python -m benchmarks.beside MODEL [--layouts both,pair] [--lengths fixed,mixed] [--jobs N] [--live N]
                                [--rate R] [--mps] [--limit SECONDS] [--out DIR] [--quick]
                                [SGLang's flags for every engine]

The bare engine comes first and answers each batch as one list (`Engine.async_generate`, nothing streamed);
the jobs of every layout are compared with that. Then, of each layout: live requests alone, the batch alone,
and both at once, from the moment at which the first job is handed in. Layouts run one after the other, on one
GPU or on the CPU. Whatever was measured is on disk when the time is over.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import sys
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final, Literal

import msgspec

from benchmarks import report
from benchmarks.bare import Bare, read_arguments
from benchmarks.disaggregation import ONE_THREAD
from benchmarks.gpu import ROOM
from benchmarks.layouts import PATIENCE, START_SECONDS, run_jobs
from benchmarks.load import Wire, encode
from benchmarks.machine import Watch
from benchmarks.readings import Taken
from benchmarks.report import Draft
from benchmarks.told import MODEL, write
from benchmarks.traces import Goal, Outcome, arrivals
from benchmarks.workload import IDS, drawn
from inferbus.schemas.fleet import Role
from inferbus.schemas.subjects import Subjects
from inferbus.workers.client import Client
from inferbus.workers.observe import logs
from inferbus.workers.stack.flags import RESERVED, RESERVED_TOKENS, TOKENS
from inferbus.workers.stack.local import LocalStack, free_ports
from inferbus.workers.stack.mps import Mps
from inferbus.workers.stack.processes import spawn
from inferbus.workers.stack.server import HOST

LAYOUTS: Final[dict[str, tuple[Role, ...]]] = {"both": ("both",), "pair": ("prefill", "decode")}
LENGTHS: Final[dict[str, float]] = {"fixed": 0.0, "mixed": 0.8}
"""How far the lengths of jobs are apart: the standard deviation of their logarithms."""
BATCH_SECONDS: Final = 300.0
"""That a batch may take."""
WARM: Final = 64
"""Jobs before anything is measured."""
SUBJECT: Final = Subjects().request(MODEL, "tokens")
GOAL: Final = Goal()

What = Literal["whole", "live", "jobs", "beside"]


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """What is asked.

    Attributes:
        jobs: How many there are in a batch.
        prompt: Median tokens of their prompts, and tokens of live ones.
        answer: Median tokens of their answers.
        live: Live requests where nothing else runs.
        live_answer: Tokens of their answers.
        rate: Of live requests, a second.
    """

    jobs: int
    prompt: int
    answer: int
    live: int
    live_answer: int
    rate: float

    def batch(self, lengths: str, reading: str, count: int = 0) -> list[dict[str, Any]]:
        """The jobs of one reading: lengths are the same in all of them, and no prompt comes twice.

        Args:
            lengths: `fixed` or `mixed`.
            reading: Makes prompts its own.
            count: How many, where not all.
        """
        sizes, tokens = random.Random(lengths), random.Random(f"{lengths} {reading}")
        spread = LENGTHS[lengths]
        return [
            _body(tokens, drawn(sizes, self.prompt, spread), drawn(sizes, self.answer, spread))
            for _ in range(count or self.jobs)
        ]

    def live_requests(self, reading: str, seconds: float) -> tuple[list[bytes], list[float]]:
        """Live requests of so many seconds, encoded, and their moments."""
        tokens, due = random.Random(f"live {reading}"), arrivals(self.rate, seconds, seed=reading)
        return [encode(_body(tokens, self.prompt, self.live_answer)) for _ in due], due


FULL: Final = Load(jobs=2400, prompt=512, answer=128, live=50, live_answer=64, rate=2.5)
QUICK: Final = Load(jobs=48, prompt=64, answer=16, live=8, live_answer=8, rate=4.0)


class Reading(msgspec.Struct, frozen=True, kw_only=True):
    """What was measured.

    Attributes:
        layout: `bare`, `both` or `pair`.
        lengths: Of the jobs; none where there were only live requests.
        what: `whole` list of the bare engine, `live` requests alone, `jobs` alone, or live requests `beside`
            jobs.
        seconds: From the first job handed in to the last result.
        rate: Output tokens of jobs a second.
        ratio: That to the bare engine's rate in the same run.
        live: What became of live requests; their times count from the moment they were due.
        others: Cores that none of the benchmark's processes used.
        stolen: Cores that the hypervisor kept.
    """

    layout: str
    lengths: str | None
    what: What
    seconds: float | None = None
    rate: float | None = None
    ratio: float | None = None
    live: Outcome | None = None
    others: float = 0.0
    stolen: float = 0.0

    def shown(self) -> str:
        """In a line."""
        line = " ".join(filter(None, (f"{self.layout},", self.lengths, self.what)))
        if self.rate is not None:
            line += f": {self.rate:,.0f} tok/s in {self.seconds:.1f} s"
        if self.ratio is not None:
            line += f", {self.ratio:.3f} of the bare engine"
        return f"{line}; live: {self.live.shown()}" if self.live is not None else line


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One layout with jobs of one kind of lengths; times in milliseconds.

    Attributes:
        layout: Of the workers.
        lengths: Of the jobs.
        jobs: Rate of jobs alone, to the bare engine's.
        jobs_beside: The same with live requests beside them.
        first_alone: First token of a live request where nothing else runs: p50 and p99.
        first_beside: The same beside the batch.
        gap_alone: 99th percentile of the time between two tokens of a live request alone.
        gap_beside: The same beside the batch.
    """

    layout: str
    lengths: str
    jobs: float | None
    jobs_beside: float | None
    first_alone: tuple[float, float] | None
    first_beside: tuple[float, float] | None
    gap_alone: float | None
    gap_beside: float | None


class Run:
    """One run of the program.

    Args:
        model: Folder.
        flags: SGLang's, for every engine.
        load: What is asked.
        layouts: In their order.
        lengths: Of jobs, in their order.
        mps: Whether a pair on one GPU runs under MPS.
        out: Folder for the report.
        quick: Whether this only tries it out.
    """

    def __init__(
        self,
        model: str,
        flags: list[str],
        load: Load,
        *,
        layouts: list[str],
        lengths: list[str],
        mps: bool,
        out: Path,
        quick: bool,
    ) -> None:
        self._model = model
        self._flags = flags
        self._load = load
        self._layouts = layouts
        self._lengths = lengths
        self._mps = mps
        self._logs = out / "logs"
        self.draft = Draft("beside", out, quick=quick)
        self._gpu = bool(self.draft.machine.gpus) and os.environ.get("INFERBUS_CPU") != "1"
        self._env: dict[str, str | None] = dict(PATIENCE)
        if not self._gpu:
            self._env |= {"CUDA_VISIBLE_DEVICES": "", **ONE_THREAD}

    async def everything(self) -> None:
        """The bare engine and then the layouts; one that fails is told of and leaves the others."""
        for name in ("bare", *self._layouts):
            try:
                await (self._bare() if name == "bare" else self._layout(name))
            except Exception as error:  # noqa: BLE001 - what the other layouts give is wanted all the same
                self.draft.note(f"{name}: {type(error).__name__}: {error}")
            self.save()

    async def _bare(self) -> None:
        began, plan, out = time.monotonic(), self._logs / "bare.plan", self._logs / "bare.out"
        self._logs.mkdir(parents=True, exist_ok=True)
        out.unlink(missing_ok=True)
        write(plan, msgspec.json.encode((self._load, self._lengths)))
        # Engines that start at the same time have been seen to draw the same port.
        ports = ["--host", HOST, "--nccl-port", str(free_ports(1)[0])]
        command = [sys.executable, "-m", "benchmarks.beside", "--bare", str(plan), str(out)]
        command += ["--model-path", self._model, *ports, *self._flags, *self._room("both")]
        env = {**self._env, "SGLANG_HOST_IP": HOST}
        self.draft.say("bare: starting")
        child = await spawn("bare", command, log=self._logs / "bare.log", env=env)
        try:
            limit = START_SECONDS + BATCH_SECONDS * len(self._lengths)

            async def there() -> bool:
                return out.exists()

            await child.until(there, timeout=limit, poll=0.1)
        finally:
            await child.stop(grace=5.0)
        for lengths, taken in msgspec.json.decode(out.read_bytes(), type=dict[str, Taken]).items():
            self._keep(
                Reading(
                    layout="bare",
                    lengths=lengths,
                    what="whole",
                    seconds=round(taken.seconds, 3),
                    rate=round(taken.tokens / taken.seconds, 1),
                    others=taken.others,
                    stolen=taken.stolen,
                )
            )
        self.draft.note(f"bare: done after {time.monotonic() - began:.0f} s")

    async def _layout(self, name: str) -> None:
        async with self._fleet(name) as stack, Client.connect(stack.url, owner="bench") as client:
            await run_jobs(client, self._load.batch("fixed", f"{name} warm", WARM), streamed=False)
            await asyncio.to_thread(self._live, stack.url, *self._load.live_requests(f"{name} warm", 1.0))
            await self._read(name, None, "live", stack, client, seconds=self._load.live / self._load.rate)
            for lengths in self._lengths:
                taken = await self._read(name, lengths, "jobs", stack, client)
                await self._read(name, lengths, "beside", stack, client, seconds=taken)

    @asynccontextmanager
    async def _fleet(self, name: str) -> AsyncIterator[LocalStack]:
        roles, began = LAYOUTS[name], time.monotonic()
        async with contextlib.AsyncExitStack() as exits:
            shared = self._mps and self._gpu and len(roles) > 1
            mps = await exits.enter_async_context(Mps()) if shared else None
            self.draft.say(f"{name}: starting {' and '.join(roles)}{' under MPS' if mps else ''}")
            stack = LocalStack(
                self._model,
                model=MODEL,
                roles=roles,
                flags=self._flags,
                role_flags={role: self._room(role) for role in roles},
                env={**self._env, **(mps.env if mps else {})},
                directory=self._logs / name,
                ready_timeout=START_SECONDS,
                grace=1.0,
            )
            await exits.enter_async_context(stack)
            self.draft.note(f"{name}: ready after {time.monotonic() - began:.0f} s")
            yield stack

    def _room(self, role: Role) -> list[str]:
        tokens = ROOM[1][role] if self._gpu else TOKENS["cpu"]
        more = [RESERVED, RESERVED_TOKENS] if role == "decode" else []
        return ["--max-total-tokens", str(tokens), *more]

    async def _read(
        self,
        layout: str,
        lengths: str | None,
        what: What,
        stack: LocalStack,
        client: Client,
        *,
        seconds: float = 0.0,
    ) -> float:
        """Jobs of these lengths, if any, and live requests for so many seconds; how long the jobs took."""
        jobs = None
        sessions = [stack.server.child.pid, *(child.pid for child in stack.workers.values())]
        bodies = self._load.batch(lengths, f"{layout} {what}") if lengths else []
        requests = self._load.live_requests(f"{layout} {lengths} {what}", seconds) if seconds else None
        with Watch({}, sessions=sessions) as watch:
            if bodies:
                jobs = asyncio.create_task(run_jobs(client, bodies, streamed=False, seconds=BATCH_SECONDS))
            live = await asyncio.to_thread(self._live, stack.url, *requests) if requests else None
            taken = await jobs if jobs else None
        rate = round(taken.tokens / taken.seconds, 1) if taken else None
        bare = self._found("bare", lengths, "whole")
        self._keep(
            Reading(
                layout=layout,
                lengths=lengths,
                what=what,
                seconds=round(taken.seconds, 3) if taken else None,
                rate=rate,
                ratio=round(rate / bare.rate, 4) if rate and bare and bare.rate else None,
                live=live,
                others=watch.others,
                stolen=watch.stolen,
            )
        )
        return taken.seconds if taken else 0.0

    def _live(self, url: str, bodies: list[bytes], due: list[float]) -> Outcome:
        with Wire(url) as wire:
            sent = wire.paced(SUBJECT, bodies, due)
        return Outcome.of(sent, self._load.live_answer, GOAL)

    def _keep(self, found: Reading) -> None:
        self.draft.readings.append(found)
        self.draft.say(found.shown())
        self.save()

    def _found(self, layout: str, lengths: str | None, what: What) -> Reading | None:
        matching = (
            each
            for each in self.draft.readings
            if (each.layout, each.lengths, each.what) == (layout, lengths, what)
        )
        return next(matching, None)

    def _row(self, layout: str, lengths: str) -> Row:
        live, jobs, beside = (
            self._found(layout, None, "live"),
            self._found(layout, lengths, "jobs"),
            self._found(layout, lengths, "beside"),
        )
        return Row(
            layout=layout,
            lengths=lengths,
            jobs=jobs.ratio if jobs else None,
            jobs_beside=beside.ratio if beside else None,
            first_alone=_first(live),
            first_beside=_first(beside),
            gap_alone=_gap(live),
            gap_beside=_gap(beside),
        )

    def save(self) -> Path:
        """Writes what there is so far."""
        self.draft.summary = [
            self._row(layout, lengths)
            for layout in self._layouts
            for lengths in self._lengths
            if self._found(layout, lengths, "jobs")
        ]
        setup = {
            "flags": self._flags,
            "environment": self._env,
            "load": self._load,
            "rooms": {role: self._room(role) for name in self._layouts for role in LAYOUTS[name]},
            "gpu": self._gpu,
            "mps": self._mps,
        }
        return self.draft.save(setup)


def _body(draw: random.Random, prompt: int, answer: int) -> dict[str, Any]:
    return {
        "token_ids": [draw.randrange(*IDS) for _ in range(prompt)],
        "max_tokens": answer,
        "temperature": 0.0,
        "ignore_eos": True,
    }


def _first(reading: Reading | None) -> tuple[float, float] | None:
    found = reading.live.first if reading and reading.live else None
    return (found.p50, found.p99) if found else None


def _gap(reading: Reading | None) -> float | None:
    found = reading.live.gap if reading and reading.live else None
    return found.p99 if found else None


async def _whole(bare: Bare, load: Load, lengths: Sequence[str]) -> Mapping[str, Taken]:
    await bare.whole(load.batch("fixed", "bare warm", WARM))
    found = {}
    for each in lengths:
        bodies = load.batch(each, "bare whole")
        with Watch({}, sessions=[os.getsid(0)]) as watch:
            found[each] = await bare.whole(bodies)
        found[each].others, found[each].stolen = watch.others, watch.stolen
    return found


def _bare_main(arguments: Sequence[str]) -> int:
    """The bare engine, in a process of its own, so that nothing of it is left."""
    plan, out, *argv = arguments
    load, lengths = msgspec.json.decode(Path(plan).read_bytes(), type=tuple[Load, list[str]])
    bare = Bare(read_arguments(argv, MODEL))
    try:
        found = asyncio.run(_whole(bare, load, lengths))
    finally:
        bare.shutdown()
    write(Path(out), msgspec.json.encode(found))
    return 0


def _chosen(parser: argparse.ArgumentParser, given: str, known: Mapping[str, Any]) -> list[str]:
    names = given.split(",")
    if unknown := set(names) - set(known):
        parser.error(f"there are {', '.join(known)}, and no {', '.join(sorted(unknown))}")
    return names


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures; what there is when the time is over is what is reported."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.beside", description="See the module.", allow_abbrev=False
    )
    parser.add_argument("model", help="folder")
    parser.add_argument("--layouts", default=",".join(LAYOUTS))
    parser.add_argument("--lengths", default=",".join(LENGTHS), help="of the jobs")
    parser.add_argument("--jobs", type=int, help=f"in a batch, default {FULL.jobs}")
    parser.add_argument("--live", type=int, help=f"live requests alone, default {FULL.live}")
    parser.add_argument("--rate", type=float, help=f"of live requests, a second, default {FULL.rate}")
    parser.add_argument("--mps", action="store_true", help="a pair runs under NVIDIA MPS")
    parser.add_argument("--out", type=Path, default=report.RESULTS / "beside")
    parser.add_argument("--limit", type=float, default=3600.0, metavar="SECONDS")
    parser.add_argument("--quick", action="store_true", help="few short requests, to see that it runs")
    options, flags = parser.parse_known_args(arguments)
    given = {name: getattr(options, name) for name in ("jobs", "live", "rate")}
    given = {name: value for name, value in given.items() if value is not None}
    logs.configure(level="ERROR", format="text")
    run = Run(
        options.model,
        flags,
        msgspec.structs.replace(QUICK if options.quick else FULL, **given),
        layouts=_chosen(parser, options.layouts, LAYOUTS),
        lengths=_chosen(parser, options.lengths, LENGTHS),
        mps=options.mps,
        out=options.out,
        quick=options.quick,
    )

    async def within() -> None:
        async with asyncio.timeout(options.limit):
            await run.everything()

    try:
        asyncio.run(within())
    except TimeoutError:
        run.draft.note(f"stopped after {options.limit:g} s")
    run.save()
    print(json.dumps(msgspec.to_builtins(run.draft.summary), indent=1), flush=True)
    return 0 if run.draft.readings else 1


if __name__ == "__main__":
    sys.exit(_bare_main(sys.argv[2:]) if sys.argv[1:2] == ["--bare"] else main())
