"""On one GPU: a worker behind NATS against the bare engine, and a prefill/decode pair that shares the GPU.

    python -m benchmarks.gpu MODEL [--phases single,pair,pair-mps] [--out DIR] [--limit SECONDS] [--passes N]
                                   [--quick] [SGLang's flags for every engine]

A phase starts all of its engines at once on the same GPU and measures them in turn; those that are not
measured stand idle. `single` is the bare engine beside a worker of the role `both`; `pair` is a prefill and a
decode worker, once as they come and once without the batched copy; `pair-mps` is the same under NVIDIA MPS.
Made for machines that are lent for minutes: whatever was measured is on disk when the time is over.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import re
import shutil
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any, Final, Literal, Protocol

import msgspec

from benchmarks import machine, report
from benchmarks.bare import Bare, read_arguments
from benchmarks.load import LoadFailed, Wire, encode
from benchmarks.machine import Watch
from benchmarks.report import Report
from benchmarks.workload import Kind, Plan, Shape
from schemas.fleet import Role
from schemas.subjects import Subjects, escape
from workers.client import Client
from workers.client.messages import read_result
from workers.engine.sglang.options import BATCHED_COPY
from workers.observe import logs
from workers.stack.flags import RESERVED, RESERVED_TOKENS, placement
from workers.stack.local import LocalStack
from workers.stack.mps import Mps
from workers.stack.processes import Child, spawn
from workers.stack.server import HOST

MODEL: Final = "m"
PROFILER: Final = "py-spy"
PARTS: Final = {
    "event loop": "asyncio/runners.py",
    "SGLang, tokenizer manager": "managers/tokenizer",
    "SGLang, OpenAI formatters": "entrypoints/openai",
    "SGLang, the rest": "sglang/",
    "inferbus, NATS": "workers/bus/",
    "inferbus, engine": "workers/engine/",
    "inferbus, answers and jobs": "workers/",
    "schemas": "schemas/",
    "benchmark": "benchmarks/",
}
"""Parts of a worker by a piece of the path in a profile's frame, the more special ones first."""
START_SECONDS: Final = 240.0
ITEM_SECONDS: Final = 120.0
KV_TOKENS: Final[dict[Role, int]] = {"both": 340_000, "prefill": 60_000, "decode": 180_000}
"""Room in the KV caches, so that all engines of a phase fit one GPU of 140 GiB beside each other."""
QUICK_TOKENS: Final = 8_192
WARM: Final = 48
PATIENCE: Final = {"INFERBUS_PREFILL_TIMEOUT": "120"}
"""512 prompts at once are a queue of more seconds than a hand-off may take by default."""

What = Literal["jobs", "whole", "streams"]


class Item(msgspec.Struct, frozen=True, kw_only=True):
    """One reading.

    Attributes:
        what: All requests at once and answered whole (`jobs`: their chunks are stored as well; `whole`: they
            are not; both are one `Engine.async_generate` for the bare engine), or `streams`.
        kind: Of the requests.
        concurrency: Streams open at a time.
        requests: How many in all.
    """

    what: What
    kind: Kind = "tokens"
    concurrency: int = 0
    requests: int

    def label(self) -> str:
        """For people."""
        streams = f"{self.concurrency} streams" if self.what == "streams" else self.what
        return f"{self.kind}, {streams}"


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


class Reading(msgspec.Struct, frozen=True, kw_only=True):
    """What one item gave.

    Attributes:
        phase: Of the run.
        layout: `bare`, `both`, `pair` or `pair-pieces`, which is the pair without the batched copy.
        item: What was measured.
        number: Which pass.
        seconds: From the first request to the last answer's end.
        rate: Output tokens a second.
        messages: That the tokens came in.
        first: From a request to its first message.
        gap: From a message to the next one of its stream.
        token: A stream's time after its first message for each further token.
        cpu_us: CPU of the process that holds the engine's tokenizer manager, microseconds a token.
        others: Cores that none of this phase's processes used.
    """

    phase: str
    layout: str
    item: Item
    number: int
    seconds: float
    rate: float
    messages: int
    first: Quantiles | None
    gap: Quantiles | None
    token: Quantiles | None
    cpu_us: float
    others: float


class Taken(msgspec.Struct, kw_only=True):
    """What a layout's own way of asking found."""

    seconds: float
    tokens: int
    messages: int = 0
    first: list[float] = []
    moments: list[list[float]] = []
    cpu: float = 0.0
    others: float = 0.0

    def reading(self, phase: str, layout: str, item: Item, number: int, answer: int) -> Reading:
        """The figures of it."""
        gaps = (b - a for times in self.moments for a, b in pairwise(times))
        tokens = ((times[-1] - times[0]) / (answer - 1) for times in self.moments if len(times) > 1)
        return Reading(
            phase=phase,
            layout=layout,
            item=item,
            number=number,
            seconds=round(self.seconds, 3),
            rate=round(self.tokens / self.seconds, 1),
            messages=self.messages,
            first=Quantiles.of(self.first),
            gap=Quantiles.of(gaps),
            token=Quantiles.of(tokens),
            cpu_us=round(self.cpu / self.tokens * 1e6, 1),
            others=self.others,
        )


def bodies_of(plan: Plan, item: Item, number: int) -> list[dict[str, Any]]:
    """The requests of a reading: the same for every layout, and never twice in an engine's life."""
    # A plan does not know of `what`, so the number keeps apart what differs in it alone.
    salt = {"streams": 0, "jobs": 100, "whole": 200}[item.what] + number
    shape = Shape(kind=item.kind, concurrency=item.concurrency, requests=item.requests)
    return plan.bodies(shape, salt)


class Layout(Protocol):
    """Something that answers requests on this GPU."""

    name: str

    @property
    def pid(self) -> int:
        """The process that holds the engine's tokenizer manager."""
        ...

    async def start(self) -> None:
        """Brings it up."""
        ...

    async def stop(self) -> None:
        """Leaves nothing of it."""
        ...

    async def take(self, item: Item, number: int) -> Taken:
        """Measures."""
        ...


class BareLayout:
    """`sgl.Engine` in a process of its own, which is told by files what to do, line by line."""

    name = "bare"

    def __init__(self, model: str, flags: list[str], env: Mapping[str, str | None], folder: Path) -> None:
        self._model = model
        self._flags = flags
        self._env = env
        self._folder = folder
        self._orders = folder / "orders"
        self._log = folder / "bare.log"
        self._child: Child | None = None
        self._count = 0

    @property
    def pid(self) -> int:
        """The process that holds the engine's tokenizer manager."""
        assert self._child is not None
        return self._child.pid

    async def start(self) -> None:
        """Brings it up."""
        self._orders.mkdir(parents=True, exist_ok=True)
        program = [sys.executable, "-m", "benchmarks.gpu", "--bare", str(self._orders)]
        command = [*program, "--model-path", self._model, "--host", HOST, *self._flags]
        self._child = await spawn("bare", command, log=self._log, env=self._env)
        await self._until(self._orders / "ready", START_SECONDS)

    async def stop(self) -> None:
        """Leaves nothing of it."""
        if self._child is not None:
            await self._child.stop(grace=5.0)

    async def take(self, item: Item, number: int) -> Taken:
        """Measures."""
        self._count += 1
        order, answer = (self._orders / f"{self._count}.{end}" for end in ("order", "answer"))
        _write(order, msgspec.json.encode((item, number)))
        await self._until(answer, ITEM_SECONDS)
        return msgspec.json.decode(answer.read_bytes(), type=Taken)

    async def _until(self, file: Path, seconds: float) -> None:
        assert self._child is not None

        async def there() -> bool:
            return os.path.exists(file)  # noqa: ASYNC240

        await self._child.until(there, timeout=seconds, poll=0.02)


class FleetLayout:
    """Workers behind an embedded NATS server."""

    def __init__(
        self,
        name: str,
        model: str,
        roles: tuple[Role, ...],
        flags: list[str],
        role_flags: dict[Role, list[str]],
        env: Mapping[str, str | None],
        plan: Plan,
        folder: Path,
    ) -> None:
        self.name = name
        self._plan = plan
        self._stack = LocalStack(
            model,
            model=MODEL,
            roles=roles,
            flags=flags,
            role_flags=role_flags,
            env={**PATIENCE, **env},
            directory=folder / name,
            ready_timeout=START_SECONDS,
            grace=1.0,
        )
        self._exit = contextlib.AsyncExitStack()
        self._wire: Wire | None = None
        self._client: Client | None = None

    @property
    def pid(self) -> int:
        """The process that holds the engine's tokenizer manager: of the last role, which owns requests."""
        return list(self._stack.workers.values())[-1].pid

    async def start(self) -> None:
        """Brings it up."""
        await self._exit.enter_async_context(self._stack)
        self._wire = self._exit.enter_context(Wire(self._stack.url))
        self._client = await self._exit.enter_async_context(Client.connect(self._stack.url, owner="bench"))

    async def stop(self) -> None:
        """Leaves nothing of it."""
        await self._exit.aclose()

    async def take(self, item: Item, number: int) -> Taken:
        """Measures."""
        bodies = bodies_of(self._plan, item, number)
        sessions = [self._stack.server.child.pid, *(each.pid for each in self._stack.workers.values())]
        with Watch({"main": self.pid}, sessions=sessions) as watch:
            taken = await (
                self._streams(item, bodies) if item.what == "streams" else self._jobs(item, bodies)
            )
        taken.cpu, taken.others = watch.cpu["main"], watch.others
        return taken

    async def _streams(self, item: Item, bodies: list[dict[str, Any]]) -> Taken:
        assert self._wire is not None
        subject = Subjects().request(MODEL, item.kind)
        moments: dict[bytes, list[float]] = {}
        tally = await asyncio.to_thread(
            self._wire.run,
            subject,
            [encode(body) for body in bodies],
            concurrency=item.concurrency,
            moments=moments,
        )
        return Taken(
            seconds=tally.seconds,
            tokens=len(bodies) * self._plan.answer,
            messages=tally.chunks,
            first=tally.first,
            moments=list(moments.values()),
        )

    async def _jobs(self, item: Item, bodies: list[dict[str, Any]]) -> Taken:
        """Durable jobs, all handed in at once; over when the last result is stored."""
        assert self._client is not None
        client, arrived, done = self._client, list[Any](), asyncio.Event()

        def received(message: Any) -> None:
            arrived.append(message)
            if len(arrived) == len(bodies):
                done.set()

        subscription = await client.bus.subscribe(f"infer.results.{escape('bench')}.*", received)
        await client.bus.flush()
        started = time.perf_counter()
        streamed = item.what == "jobs"
        await asyncio.gather(*(client.submit("tokens", MODEL, body, stream=streamed) for body in bodies))
        submitted = time.perf_counter() - started
        await asyncio.wait_for(done.wait(), ITEM_SECONDS)
        seconds = time.perf_counter() - started
        await subscription.unsubscribe()
        results = [read_result(message.data, message.headers) for message in arrived]
        tokens = sum(_tokens(result) for result in results)
        again = sum(result.attempt > 1 for result in results)
        if tokens != len(bodies) * self._plan.answer or again:
            raise LoadFailed(f"{tokens} tokens came of {len(bodies)} jobs, {again} of them tried again")
        _say(f"    {len(bodies)} jobs handed in after {submitted:.2f} s")
        return Taken(seconds=seconds, tokens=tokens)


def _tokens(result: Any) -> int:
    if result.error is not None:
        raise LoadFailed(f"a job ended with {result.error}")
    return sum(len(choice.token_ids) for choice in result.answer.choices)


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """How much is done.

    Attributes:
        jobs: Requests of an offline reading.
        streams: Concurrency and requests of the readings with streams.
        plan: Lengths.
        passes: How often.
        wanted: Pattern of the items that are measured, by their labels.
    """

    jobs: int
    streams: list[tuple[int, int]]
    plan: Plan
    passes: int
    wanted: str = ""

    def items(self, phase: str, number: int) -> list[Item]:
        """What is measured in one pass of a phase."""
        found = [Item(what="jobs", requests=self.jobs)]
        found += [Item(what="streams", concurrency=c, requests=r) for c, r in self.streams]
        if phase == "single":
            found.insert(1, Item(what="whole", requests=self.jobs))
            if number == 0:
                chat: Kind = "chat"
                found += [Item(what="streams", kind=chat, concurrency=c, requests=r) for c, r in self.streams]
        return [item for item in found if re.search(self.wanted, item.label())]


FULL: Final = Limits(
    jobs=512,
    streams=[(1, 6), (16, 64), (64, 192), (256, 512)],
    plan=Plan(passes=1, shapes=[], prompt=512, answer=128),
    passes=2,
)
QUICK: Final = Limits(
    jobs=24,
    streams=[(1, 2), (8, 16)],
    plan=Plan(passes=1, shapes=[], prompt=64, answer=16),
    passes=1,
)


class Run:
    """One run of the program.

    Args:
        model: Folder.
        flags: SGLang's, for every engine.
        limits: How much is done.
        phases: In their order.
        out: Folder for the report.
        logs: Folder for logs and profiles.
        tokens: Room of the KV caches, where it is the same for all.
        gate: Nothing is measured before this file is there.
    """

    def __init__(
        self,
        model: str,
        flags: list[str],
        limits: Limits,
        phases: list[str],
        *,
        out: Path,
        logs: Path,
        tokens: int | None,
        gate: Path | None,
    ) -> None:
        self._model = model
        self._limits = limits
        self._out = out
        self._logs = logs
        self._tokens = tokens
        self._gate = gate
        self._place = placement(shared=True)
        self._flags = flags
        self._readings: list[Reading] = []
        self._notes: list[str] = []
        self._profiles: dict[str, dict[str, float]] = {}
        self._phases = phases
        self._taken, self._started, self._load = report.now(), time.monotonic(), machine.load()
        self._versions, self._machine = machine.versions(), machine.Machine.here()

    async def phases(self) -> None:
        """All of them, one after the other; one that fails is told of and leaves the others."""
        for phase in self._phases:
            try:
                await self._phase(phase)
            except Exception as error:  # noqa: BLE001 - what the other phases find is wanted all the same
                self._note(f"{phase}: {type(error).__name__}: {error}")

    async def _phase(self, phase: str) -> None:
        async with contextlib.AsyncExitStack() as stack:
            mps = await stack.enter_async_context(Mps()) if phase.endswith("-mps") else None
            layouts = self._layouts(phase, mps.env if mps else {})
            _say(f"{phase}: starting {', '.join(layout.name for layout in layouts)}")
            began = time.monotonic()
            try:
                await _all(layout.start() for layout in layouts)
                self._note(f"{phase}: engines ready after {time.monotonic() - began:.0f} s")
                while self._gate is not None and not os.path.exists(self._gate):  # noqa: ASYNC110, ASYNC240
                    await asyncio.sleep(0.1)
                await self._measure(phase, layouts)
            finally:
                await _all(layout.stop() for layout in layouts)

    async def _measure(self, phase: str, layouts: Sequence[Layout]) -> None:
        for layout in layouts:
            await layout.take(Item(what="streams", concurrency=WARM, requests=WARM), 90)
            if phase == "single":
                await layout.take(Item(what="streams", kind="chat", concurrency=8, requests=8), 90)
        for number in range(self._limits.passes):
            for item in self._limits.items(phase, number):
                # The other one first in every second pass, so that none always has the warmer chip.
                for layout in layouts if number % 2 == 0 else layouts[::-1]:
                    await self._read(phase, layout, item, number)
        if phase == "single" and shutil.which(PROFILER):
            for layout in layouts:
                await self._profile(layout)

    async def _profile(self, layout: Layout) -> None:
        """Says where the processor time of the engine's process goes, with as many streams as there were."""
        file = self._logs / f"profile-{layout.name}.txt"
        seconds = "8" if self._tokens is None else "1"
        command = [PROFILER, "record", "-r", "250", "-d", seconds, "-f", "raw", "-o", str(file)]
        child = await spawn(
            "profiler", [*command, "-p", str(layout.pid)], log=self._logs / f"profile-{layout.name}.log"
        )
        concurrency, requests = self._limits.streams[-1]
        try:
            await layout.take(Item(what="streams", concurrency=concurrency, requests=requests), 50)
            async with asyncio.timeout(30):
                await child.wait()
            self._profiles[layout.name] = shares(file.read_text())
            _say(f"profile of {layout.name}: {json.dumps(self._profiles[layout.name])}")
        except (OSError, TimeoutError, LoadFailed) as error:
            self._note(f"no profile of {layout.name}: {type(error).__name__}: {error}")
        finally:
            child.kill()

    async def _read(self, phase: str, layout: Layout, item: Item, number: int) -> None:
        try:
            taken = await layout.take(item, number)
        except (LoadFailed, TimeoutError) as error:
            self._note(f"{phase}, {layout.name}, {item.label()}: {type(error).__name__}: {error}")
            return
        found = taken.reading(phase, layout.name, item, number, self._limits.plan.answer)
        self._readings.append(found)
        _say(f"{time.monotonic() - self._started:6.1f} s  {phase}, {found.layout}, {shown(found)}")
        self.save()

    def _layouts(self, phase: str, env: Mapping[str, str | None]) -> list[Layout]:
        env = {**self._place.env, **env}
        folder = self._logs / phase
        fleet: tuple[Any, ...] = (self._limits.plan, folder)
        if phase == "single":
            flags = [*self._flags, *self._room("both")]
            bare = BareLayout(self._model, flags, {**env, "SGLANG_HOST_IP": HOST, **self._quickly()}, folder)
            return [bare, FleetLayout("both", self._model, ("both",), flags, {}, env, *fleet)]
        room: dict[Role, list[str]] = {
            "prefill": self._room("prefill"),
            "decode": [*self._room("decode"), RESERVED, RESERVED_TOKENS],
        }
        roles: tuple[Role, ...] = ("prefill", "decode")
        pieces = {**env, BATCHED_COPY: "0"}
        return [
            FleetLayout("pair", self._model, roles, self._flags, room, env, *fleet),
            FleetLayout("pair-pieces", self._model, roles, self._flags, room, pieces, *fleet),
        ]

    def _room(self, role: Role) -> list[str]:
        return ["--max-total-tokens", str(self._tokens or KV_TOKENS[role])]

    def _quickly(self) -> dict[str, str]:
        """Tells the bare engine's process how long prompts and answers are."""
        return {"BENCHMARK_PLAN": msgspec.json.encode(self._limits.plan).decode()}

    def _note(self, line: str) -> None:
        self._notes.append(line)
        _say(f"{time.monotonic() - self._started:6.1f} s  {line}")

    def save(self) -> None:
        """Writes what there is so far."""
        done = Report(
            name=f"gpu-{'-'.join(self._phases)}",
            quick=self._tokens is not None,
            taken=self._taken,
            seconds=round(time.monotonic() - self._started, 1),
            versions=self._versions,
            machine=self._machine,
            load_before=self._load,
            setup={
                "flags": self._flags,
                "kv_tokens": self._tokens or KV_TOKENS,
                "decode": [RESERVED, RESERVED_TOKENS],
                "environment": PATIENCE,
                "limits": self._limits,
                "notes": self._notes,
                "profiles": self._profiles,
            },
            summary=[],
            aims=[],
            readings=self._readings,
        )
        done.save(self._out)


def shown(found: Reading) -> str:
    """A reading in a line."""
    line = (
        f"{found.item.label()}: {found.rate:,.0f} tok/s in {found.seconds:.2f} s, {found.cpu_us:.0f} us CPU"
    )
    if found.first and found.token and found.gap:
        line += (
            f", first {found.first.p50:.1f} (p99 {found.first.p99:.1f}) ms, token {found.token.p50:.2f} ms, "
            f"gap p50 {found.gap.p50:.2f} p99 {found.gap.p99:.2f} ms, {found.messages} messages"
        )
    return line


def shares(folded: str) -> dict[str, float]:
    """What parts of the program a profile's samples are in, as shares of the whole.

    Args:
        folded: A stack a line, its outermost frame first, and how often it was seen.
    """
    counts: Counter[str] = Counter()
    for line in folded.splitlines():
        stack, _, count = line.rpartition(" ")
        # The innermost frame that is somebody's decides: a library works for whoever called it.
        marks = (name for frame in stack.split(";")[::-1] for name, mark in PARTS.items() if mark in frame)
        counts[next(marks, "the rest")] += int(count)
    total = sum(counts.values()) or 1
    return {part: round(count / total, 3) for part, count in counts.most_common()}


async def _all(work: Iterable[Any]) -> None:
    """Does several things at once, each to its end; raises what the first one raised."""
    for outcome in await asyncio.gather(*work, return_exceptions=True):
        if isinstance(outcome, BaseException):
            raise outcome


def _write(file: Path, data: bytes) -> None:
    """In one step, so that whoever waits for the file finds it whole."""
    part = file.with_suffix(".part")
    part.write_bytes(data)
    part.rename(file)


def _say(line: str) -> None:
    print(line, flush=True)


class Told(Bare):
    """The bare engine as this benchmark asks it."""

    def __init__(self, arguments: Any, plan: Plan) -> None:
        super().__init__(arguments)
        self._plan = plan

    async def take(self, item: Item, number: int) -> Taken:
        """Measures."""
        bodies = bodies_of(self._plan, item, number)
        with Watch({"main": os.getpid()}, sessions=[os.getsid(0)]) as watch:
            taken = await (self._streams(item, bodies) if item.what == "streams" else self._offline(bodies))
        taken.cpu, taken.others = watch.cpu["main"], watch.others
        return taken

    async def _offline(self, bodies: list[dict[str, Any]]) -> Taken:
        sampling = {"max_new_tokens": self._plan.answer, "temperature": 0.0, "ignore_eos": True}
        started = time.perf_counter()
        answers = await self._engine.async_generate(
            input_ids=[body["token_ids"] for body in bodies], sampling_params=sampling
        )
        seconds = time.perf_counter() - started
        tokens = sum(answer["meta_info"]["completion_tokens"] for answer in answers)
        return Taken(seconds=seconds, tokens=tokens)

    async def _streams(self, item: Item, bodies: list[dict[str, Any]]) -> Taken:
        ask = self.tokens if item.kind == "tokens" else self.chat
        taken = Taken(seconds=0.0, tokens=len(bodies) * self._plan.answer)
        left = iter([encode(body) for body in bodies])

        async def one_after_another() -> None:
            for body in left:
                sent, times = time.perf_counter(), list[float]()
                messages: AsyncIterator[Any] = await ask(body)
                async for _ in messages:
                    times.append(time.perf_counter())
                taken.first.append(times[0] - sent)
                taken.moments.append(times)
                taken.messages += len(times)

        started = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            for _ in range(item.concurrency):
                group.create_task(one_after_another())
        taken.seconds = time.perf_counter() - started
        return taken


async def _serve(bare: Told, orders: Path) -> None:
    """Does what the files say until this process is ended."""
    _write(orders / "ready", b"")
    number = 1
    while True:
        order = orders / f"{number}.order"
        if not order.exists():
            await asyncio.sleep(0.02)
            continue
        item, salt = msgspec.json.decode(order.read_bytes(), type=tuple[Item, int])
        _write(orders / f"{number}.answer", msgspec.json.encode(await bare.take(item, salt)))
        number += 1


def _bare_main(arguments: list[str]) -> int:
    orders, flag, model, *argv = arguments
    plan = msgspec.json.decode(os.environ["BENCHMARK_PLAN"], type=Plan)
    bare = Told(read_arguments([flag, model, *argv], MODEL), plan)
    try:
        asyncio.run(_serve(bare, Path(orders)))
    finally:
        bare.shutdown()
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures; what there is when the time is over is what is reported."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description="See the module.")
    parser.add_argument("model")
    parser.add_argument("--phases", default="single,pair,pair-mps")
    parser.add_argument("--out", type=Path, default=report.RESULTS / "gpu")
    parser.add_argument("--logs", type=Path, help="default: a folder of the former")
    parser.add_argument("--limit", type=float, default=3600.0, metavar="SECONDS")
    parser.add_argument("--passes", type=int)
    parser.add_argument("--items", default="", metavar="PATTERN", help="those alone: tokens.*(jobs|256)")
    parser.add_argument("--gate", type=Path, help="start, but measure nothing before this file is there")
    parser.add_argument("--quick", action="store_true", help="few short requests, to see that it runs")
    options, flags = parser.parse_known_args(arguments)
    limits = QUICK if options.quick else FULL
    if options.passes:
        limits = msgspec.structs.replace(limits, passes=options.passes)
    limits = msgspec.structs.replace(limits, wanted=options.items)
    tokens = QUICK_TOKENS if options.quick else None
    logs.configure(level="ERROR", format="text")
    logs_at = options.logs or options.out / "logs"
    phases = options.phases.split(",")
    run = Run(
        options.model,
        flags,
        limits,
        phases,
        out=options.out,
        logs=logs_at,
        tokens=tokens,
        gate=options.gate,
    )

    async def within() -> None:
        async with asyncio.timeout(options.limit):
            await run.phases()

    try:
        asyncio.run(within())
    except TimeoutError:
        _say(f"stopped after {options.limit:g} s")
    run.save()
    _say(json.dumps({"readings": len(run._readings), "notes": run._notes}))
    return 0 if run._readings else 1


if __name__ == "__main__":
    given = sys.argv[1:]
    sys.exit(_bare_main(given[1:]) if given[:1] == ["--bare"] else main(given))
