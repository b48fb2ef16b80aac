"""On one GPU: workers behind NATS, the bare engine, SGLang's own server, and pairs that share the GPU.

    python -m benchmarks.gpu MODEL [--phases single,pair,pair-mps,pages] [--layouts PATTERN] [--items PATTERN]
                                   [--passes N] [--limit SECONDS] [--out DIR] [--quick]
                                   [SGLang's flags for every engine]

A phase starts all of its engines at once on the same GPU and measures them in turn; those that are not
measured stand idle:

    single  the bare engine, SGLang's HTTP server, and a worker of the role `both`
    pair    a prefill and a decode worker
    graphs  the same beside one whose decode engine has CUDA graphs up to a batch of 512
    pages   pairs with pages of 128 and 256 tokens
    pieces  a pair as it comes, and one without the batched copy

`-mps` after a phase's name has it under NVIDIA MPS; `pair-mps` is `graphs-mps`. Made for machines that are
lent for minutes: whatever was measured is on disk when the time is over, what matters most comes first, and
a layout that fails leaves the others.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import re
import sys
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from benchmarks import profiles, report
from benchmarks.layouts import KV_TOKENS, PATIENCE, BareLayout, FleetLayout, HttpLayout, Layout
from benchmarks.readings import Item, shown
from benchmarks.report import Draft
from benchmarks.workload import Plan
from inferbus.schemas.fleet import Role
from inferbus.workers.engine.sglang.options import BATCHED_COPY
from inferbus.workers.observe import logs
from inferbus.workers.stack.flags import RESERVED, RESERVED_TOKENS, placement
from inferbus.workers.stack.mps import Mps

MPS: Final = "-mps"
PHASES: Final[dict[str, tuple[str, ...]]] = {
    "single": ("bare", "both", "http"),
    "pair": ("pair",),
    "pair-mps": ("pair", "pair-graphs"),
    "graphs": ("pair", "pair-graphs"),
    "pages": ("pair-128", "pair-256"),
    "pieces": ("pair", "pair-pieces"),
}
"""The layouts of each phase; of one under MPS, where it is the same, without that in its name."""
SINGLE: Final = ("bare", "both", "http")
GRAPHS: Final = ("--cuda-graph-max-bs-decode", "512")
ROOM: Final[dict[int, dict[Role, int]]] = {
    1: {"both": 360_000, "prefill": 120_000, "decode": 360_000},
    2: {"both": KV_TOKENS["both"], "prefill": 40_000, "decode": 200_000},
    3: {"both": 200_000},
}
"""Tokens in each KV cache, by how many layouts share a GPU of 140 GiB. With the shape of Llama 3.1 8B, whose
token takes 128 KiB and whose weights take 14 GiB an engine, each has 6 GiB or more left for all else."""
QUICK_TOKENS: Final = 8_192
WARMING: Final = (
    Item(what="streams", concurrency=48, requests=48),
    Item(what="streams", kind="chat", concurrency=8, requests=8),
)
LAG: Final = 90.0
"""Seconds that other layouts may take to start once one has: they begin at the same moment."""
FAILURES: Final = 2
"""Readings that may fail one after the other before a layout is left out: each may cost a minute."""
SHOWN: Final = 300
"""Characters from each end of an error in a note."""


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """How much is done.

    Attributes:
        jobs: Requests of an offline reading.
        streams: Concurrency and requests of the readings with streams, rising.
        wide: The same, of one with as many streams as jobs, more than SGLang has CUDA graphs for.
        rates: Of paced requests, a second.
        seconds: How long those come.
        plan: Lengths.
        passes: How often.
        wanted: Pattern of the items that are measured, by their labels.
    """

    jobs: int
    streams: list[tuple[int, int]]
    wide: tuple[int, int]
    rates: list[float]
    seconds: float
    plan: Plan
    passes: int
    wanted: str = ""

    def items(self, layouts: Iterable[str]) -> list[Item]:
        """What is measured in one pass with some layouts side by side; what matters most comes first."""
        found = [Item(what="whole", requests=self.jobs), Item(what="jobs", requests=self.jobs)]
        paced = [
            Item(what="paced", rate=rate, requests=round(rate * self.seconds)) for rate in self.rates[::-1]
        ]
        both = [self._streams(*shape) for shape in self.streams[::-1]]
        found += [*both[0], *paced[:1], *(item for pair in both[1:-1] for item in pair)]
        found += [*paced[1:], *both[-1]]
        if {"pair-graphs", "bare"} & set(layouts):
            # Beside the bare engine: as many streams as there are jobs, whose chunks are streams as well.
            found.insert(3, self._streams(*self.wide)[0])
        return [item for item in found if re.search(self.wanted, item.label())]

    def takes(self, layout: str, item: Item) -> bool:
        """Whether an item says something about a layout."""
        sizes = [concurrency for concurrency, _ in self.streams]
        if layout in ("bare", "http"):
            # Neither stores anything, so whole answers are all the offline work that there is.
            return item.what != "jobs" and (layout == "bare" or item.concurrency <= sizes[-1])
        if layout == "pair-graphs":
            return item.what in ("jobs", "whole") or item.concurrency >= sizes[-1]
        if layout in PHASES["pages"]:
            return item.what == "jobs" or (item.kind == "tokens" and item.concurrency >= sizes[-2])
        # One stream at a time of chat costs as much as of tokens, and says no more.
        return layout in SINGLE or item.kind == "tokens" or item.concurrency > sizes[0]

    @staticmethod
    def _streams(concurrency: int, requests: int) -> tuple[Item, Item]:
        tokens = Item(what="streams", concurrency=concurrency, requests=requests)
        return tokens, Item(what="streams", kind="chat", concurrency=concurrency, requests=requests)


FULL: Final = Limits(
    jobs=512,
    streams=[(1, 16), (16, 64), (64, 192), (256, 512)],
    wide=(512, 512),
    rates=[20, 40],
    seconds=10.0,
    plan=Plan(passes=1, shapes=[], prompt=512, answer=128),
    passes=1,
)
QUICK: Final = Limits(
    jobs=24,
    streams=[(1, 2), (8, 16)],
    wide=(12, 16),
    rates=[2, 4],
    seconds=3.0,
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
        layouts: Pattern of those that are started.
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
        layouts: str,
        out: Path,
        logs: Path,
        tokens: int | None,
        gate: Path | None,
    ) -> None:
        self._model = model
        self._limits = limits
        self._logs = logs
        self._tokens = tokens
        self._gate = gate
        self._place = placement(shared=True)
        self._flags = flags
        self._phases = phases
        self._wanted = layouts
        self._profiles: dict[str, dict[str, float]] = {}
        self._rooms: dict[str, dict[str, list[str]]] = {}
        self._failed: Counter[str] = Counter()
        self.draft = Draft(f"gpu-{'-'.join(phases)}", out, quick=tokens is not None)

    async def phases(self) -> None:
        """All of them, one after the other; one that fails is told of and leaves the others."""
        for phase in self._phases:
            try:
                await self._phase(phase)
            except Exception as error:  # noqa: BLE001 - what the other phases find is wanted all the same
                self.draft.note(f"{phase}: {_brief(error)}")
            self.save()

    async def _phase(self, phase: str) -> None:
        async with contextlib.AsyncExitStack() as stack:
            mps = await stack.enter_async_context(Mps()) if phase.endswith(MPS) else None
            layouts = self._layouts(phase, mps.env if mps else {})
            self.draft.say(f"{phase}: starting {', '.join(layout.name for layout in layouts)}")
            try:
                ready = await self._start(phase, layouts)
                while self._gate is not None and not os.path.exists(self._gate):  # noqa: ASYNC110, ASYNC240
                    await asyncio.sleep(0.1)
                await self._measure(phase, ready)
            finally:
                await self._all(phase, "did not stop", {each.name: each.stop() for each in layouts})

    async def _start(self, phase: str, layouts: Sequence[Layout]) -> list[Layout]:
        """Those that could be started."""
        began, clocks = time.monotonic(), dict[str, asyncio.Timeout]()

        async def start(layout: Layout) -> None:
            try:
                async with asyncio.timeout(None) as clocks[layout.name]:
                    await layout.start()
            finally:
                clocks.pop(layout.name, None)
            self.draft.note(f"{phase}: {layout.name} ready after {time.monotonic() - began:.0f} s")
            for clock in clocks.values():
                if clock.when() is None:
                    clock.reschedule(asyncio.get_running_loop().time() + LAG)

        failed = await self._all(phase, "did not start", {each.name: start(each) for each in layouts})
        ready = []
        for layout in layouts:
            if layout.name in failed:
                # What is left of it would take room on the GPU.
                await self._all(phase, "did not stop", {layout.name: layout.stop()})
            else:
                ready.append(layout)
        return ready

    async def _measure(self, phase: str, layouts: Sequence[Layout]) -> None:
        self._failed.clear()
        for layout in layouts:
            for warm in WARMING:
                await self._read(phase, layout, warm, 90, kept=False)
        for number in range(self._limits.passes):
            for item in self._limits.items([layout.name for layout in layouts]):
                # The other one first in every second pass, so that none always has the warmer chip.
                for layout in layouts if number % 2 == 0 else layouts[::-1]:
                    if self._limits.takes(layout.name, item) and self._failed[layout.name] < FAILURES:
                        await self._read(phase, layout, item, number)
        if phase == "single" and profiles.available():
            for layout in layouts:
                await self._profile(layout)

    async def _profile(self, layout: Layout) -> None:
        """Says where the processor time of the engine's process goes, with as many streams as there were."""
        concurrency, requests = self._limits.streams[-1]
        item = Item(what="streams", concurrency=concurrency, requests=requests)
        try:
            self._profiles[layout.name] = await profiles.profile(
                layout.pid,
                lambda: layout.take(item, 50),
                seconds=8 if self._tokens is None else 1,
                file=self._logs / f"profile-{layout.name}.txt",
            )
            self.draft.say(f"profile of {layout.name}: {json.dumps(self._profiles[layout.name])}")
        except Exception as error:  # noqa: BLE001 - the figures are there already
            self.draft.note(f"no profile of {layout.name}: {_brief(error)}")
        self.save()

    async def _read(self, phase: str, layout: Layout, item: Item, number: int, *, kept: bool = True) -> None:
        try:
            taken = await layout.take(item, number)
            found = taken.reading(phase, layout.name, item, number, self._limits.plan.answer)
        except Exception as error:  # noqa: BLE001 - what other layouts and items give is wanted all the same
            self._failed[layout.name] += 1
            self.draft.note(f"{phase}, {layout.name}, {item.label()}: {_brief(error)}")
            if self._failed[layout.name] == FAILURES:
                self.draft.note(f"{phase}: {layout.name} is left out from here on")
            return
        del self._failed[layout.name]
        if kept:
            self.draft.readings.append(found)
            self.draft.say(f"{phase}, {found.layout}, {shown(found)}")
            self.save()

    def _layouts(self, phase: str, env: Mapping[str, str | None]) -> list[Layout]:
        names = PHASES.get(phase) or PHASES[phase.removesuffix(MPS)]
        names = tuple(name for name in names if re.search(self._wanted, name))
        rooms = self._rooms[phase] = {}
        env = {**self._place.env, **env}
        folder = self._logs / phase
        found: list[Layout] = []
        for name in names:
            if name in SINGLE:
                rooms[name] = self._room(len(names), "both")
                flags = [*self._flags, *rooms[name]]
                found.append(self._single(name, flags, env, folder))
            else:
                found.append(self._pair(name, len(names), env, folder, rooms))
        return found

    def _single(self, name: str, flags: list[str], env: Mapping[str, str | None], folder: Path) -> Layout:
        plan = self._limits.plan
        if name == "bare":
            return BareLayout(self._model, flags, env, plan, folder)
        if name == "http":
            cpu = self._place.where == "the CPU"
            return HttpLayout(self._model, flags, env, plan, folder, cpu=cpu)
        return FleetLayout(
            name,
            self._model,
            roles=("both",),
            flags=flags,
            role_flags={},
            env=env,
            plan=plan,
            folder=folder,
        )

    def _pair(
        self,
        name: str,
        pairs: int,
        env: Mapping[str, str | None],
        folder: Path,
        rooms: dict[str, list[str]],
    ) -> Layout:
        more = name.removeprefix("pair").removeprefix("-")
        # The last one of a flag holds, so these come after the user's own.
        page = ["--page-size", more] if more.isdigit() else []
        graphs = list(GRAPHS) if more == "graphs" else []
        role_flags: dict[Role, list[str]] = {
            "prefill": [*self._room(pairs, "prefill"), *page],
            "decode": [*self._room(pairs, "decode"), RESERVED, RESERVED_TOKENS, *page, *graphs],
        }
        rooms[name] = [*role_flags["prefill"], "and", *role_flags["decode"]]
        return FleetLayout(
            name,
            self._model,
            roles=("prefill", "decode"),
            flags=self._flags,
            role_flags=role_flags,
            env={**env, **({BATCHED_COPY: "0"} if more == "pieces" else {})},
            plan=self._limits.plan,
            folder=folder,
        )

    def _room(self, layouts: int, role: Role) -> list[str]:
        return ["--max-total-tokens", str(self._tokens or ROOM[layouts][role])]

    async def _all(self, phase: str, what: str, work: Mapping[str, Any]) -> set[str]:
        """Does something with several layouts at once, each to its end; those that failed are told of."""
        failed = set()
        for name, error in zip(
            work, await asyncio.gather(*work.values(), return_exceptions=True), strict=True
        ):
            if isinstance(error, Exception):
                self.draft.note(f"{phase}: {name} {what}: {_brief(error)}")
                failed.add(name)
            elif isinstance(error, BaseException):
                raise error
        return failed

    def save(self) -> Path:
        """Writes what there is so far."""
        return self.draft.save(
            {
                "flags": self._flags,
                "layouts": self._rooms,
                "environment": PATIENCE,
                "limits": self._limits,
                "profiles": self._profiles,
            }
        )


def _brief(error: BaseException) -> str:
    text = f"{type(error).__name__}: {error}"
    # What a child's log has to say of its end is at the end.
    return text if len(text) <= 2 * SHOWN else f"{text[:SHOWN]} … {text[-SHOWN:]}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures; what there is when the time is over is what is reported."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu", description="See the module.", allow_abbrev=False
    )
    parser.add_argument("model")
    parser.add_argument("--phases", default="single,pair,pair-mps,pages")
    parser.add_argument("--layouts", default="", metavar="PATTERN", help="those alone: ^pair$")
    parser.add_argument("--items", default="", metavar="PATTERN", help="those alone: tokens.*(jobs|256)")
    parser.add_argument("--out", type=Path, default=report.RESULTS / "gpu")
    parser.add_argument("--logs", type=Path, help="default: a folder of the former")
    parser.add_argument("--limit", type=float, default=3600.0, metavar="SECONDS")
    parser.add_argument("--passes", type=int)
    parser.add_argument("--gate", type=Path, help="start, but measure nothing before this file is there")
    parser.add_argument("--quick", action="store_true", help="few short requests, to see that it runs")
    options, flags = parser.parse_known_args(arguments)
    phases = options.phases.split(",")
    if unknown := {phase for phase in phases if not {phase, phase.removesuffix(MPS)} & set(PHASES)}:
        parser.error(f"no phases: {', '.join(sorted(unknown))}")
    limits = msgspec.structs.replace(QUICK if options.quick else FULL, wanted=options.items)
    if options.passes:
        limits = msgspec.structs.replace(limits, passes=options.passes)
    logs.configure(level="ERROR", format="text")
    run = Run(
        options.model,
        flags,
        limits,
        phases,
        layouts=options.layouts,
        out=options.out,
        logs=options.logs or options.out / "logs",
        tokens=QUICK_TOKENS if options.quick else None,
        gate=options.gate,
    )

    async def within() -> None:
        async with asyncio.timeout(options.limit):
            await run.phases()

    try:
        asyncio.run(within())
    except TimeoutError:
        run.draft.note(f"stopped after {options.limit:g} s")
    run.save()
    print(json.dumps({"readings": len(run.draft.readings), "notes": run.draft.notes}), flush=True)
    return 0 if run.draft.readings else 1


if __name__ == "__main__":
    sys.exit(main())
