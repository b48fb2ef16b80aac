"""What answers cost that a seed repeats, on one GPU.

    python -m benchmarks.seeds MODEL [--passes N] [--limit SECONDS] [--out DIR] [SGLang's flags]

Two workers of the role `both` with the same flags, one of them with `--enable-deterministic-inference`, take
turns at the same requests. Then each answers one sampled request with a seed alone and several times among
others, and the different answers are counted: one, where the seed repeats it.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any, Final

import msgspec

from benchmarks import report
from benchmarks.gpu import ROOM
from benchmarks.layouts import FleetLayout
from benchmarks.readings import Item, Reading
from benchmarks.report import Draft
from benchmarks.told import MODEL
from benchmarks.workload import Plan
from inferbus.workers.client import Client
from inferbus.workers.observe import logs
from inferbus.workers.stack.flags import placement

FLAG: Final = "--enable-deterministic-inference"
PLAN: Final = Plan(passes=2, shapes=[], prompt=256, answer=128)
ITEMS: Final = (
    Item(what="whole", requests=512),
    Item(what="streams", concurrency=64, requests=128),
    Item(what="streams", concurrency=1, requests=4),
)
WARM: Final = Item(what="whole", requests=64)
SEEDED: Final = {"token_ids": list(range(1000, 1064)), "max_tokens": 64, "ignore_eos": True, "seed": 7}
ASKED: Final = 12
"""How often the request with a seed is sent among others."""
OTHERS: Final = 48
"""Requests that run beside it, of other lengths."""


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One item.

    Attributes:
        item: What was measured.
        plain: Output tokens a second, the median of all passes.
        deterministic: The same of the worker with the flag.
        ratio: The latter to the former.
    """

    item: str
    plain: float
    deterministic: float
    ratio: float


class Worker(FleetLayout):
    """One worker, and what it makes of a seed."""

    async def answers(self) -> int:
        """Different answers to the request with a seed, alone and among others."""
        async with Client.connect(self._stack.url) as client:

            async def ask(body: dict[str, Any]) -> tuple[int, ...]:
                stream = client.tokens(MODEL, **body)
                return tuple([token async for chunk in stream for token in chunk.token_ids])

            alone = await ask(SEEDED)
            async with asyncio.TaskGroup() as group:
                for number in range(OTHERS):
                    ids = [2000 + number, *range(3000, 3000 + 5 * number)]
                    group.create_task(ask({**SEEDED, "token_ids": ids, "seed": number}))
                among = [group.create_task(ask(SEEDED)) for _ in range(ASKED)]
            return len({alone, *(task.result() for task in among)})


class Run:
    """One run of the program.

    Args:
        model: Folder.
        flags: SGLang's, for both workers.
        passes: How often each item is measured.
        out: Folder for the report.
    """

    def __init__(self, model: str, flags: list[str], passes: int, out: Path) -> None:
        self._plan = msgspec.structs.replace(PLAN, passes=passes)
        self._flags = [*flags, "--max-total-tokens", str(ROOM[2]["both"])]
        self._workers = [
            Worker(
                name,
                model,
                roles=("both",),
                flags=[*self._flags, *own],
                role_flags={},
                env=placement(shared=True).env,
                plan=self._plan,
                folder=out.absolute() / "logs",
            )
            for name, own in (("plain", []), ("deterministic", [FLAG]))
        ]
        self.answers: dict[str, int] = {}
        self.draft = Draft("seeds", out)

    async def everything(self) -> None:
        """Starts both and lets them take turns."""
        try:
            self.draft.say("starting both workers")
            async with asyncio.TaskGroup() as group:
                for worker in self._workers:
                    group.create_task(worker.start())
            self.draft.note("both workers are ready")
            for worker in self._workers:
                await worker.take(WARM, -1)
            for worker in self._workers:
                self.answers[worker.name] = await worker.answers()
                self.draft.say(f"{worker.name}: {self.answers[worker.name]} different answers")
            for number in range(self._plan.passes):
                for item in ITEMS:
                    # The other one first in every second pass, so that none always has the warmer chip.
                    for worker in self._workers if number % 2 == 0 else self._workers[::-1]:
                        taken = await worker.take(item, number)
                        found = taken.reading("seeds", worker.name, item, number, self._plan.answer)
                        self.draft.readings.append(found)
                        self.draft.say(f"{item.label()}, {worker.name}: {found.rate:,.0f} tok/s")
                        self.save()
        finally:
            await asyncio.gather(*(worker.stop() for worker in self._workers), return_exceptions=True)

    def rows(self) -> list[Row]:
        """What there is so far."""
        readings: list[Reading] = self.draft.readings
        rows = []
        for item in ITEMS:
            plain, deterministic = (
                [each.rate for each in readings if each.layout == worker.name and each.item == item]
                for worker in self._workers
            )
            if plain and deterministic:
                a, b = median(plain), median(deterministic)
                rows.append(Row(item=item.label(), plain=a, deterministic=b, ratio=round(b / a, 3)))
        return rows

    def save(self) -> Path:
        """Writes what there is so far."""
        self.draft.summary = self.rows()
        return self.draft.save({"flags": self._flags, "plan": self._plan, "answers": self.answers})


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures; what there is when the time is over is what is reported."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.seeds", description="See the module.", allow_abbrev=False
    )
    parser.add_argument("model", help="folder")
    parser.add_argument("--passes", type=int, default=PLAN.passes)
    parser.add_argument("--out", type=Path, default=report.RESULTS / "seeds", metavar="DIR")
    parser.add_argument("--limit", type=float, default=390.0, metavar="SECONDS")
    options, flags = parser.parse_known_args(arguments)
    logs.configure(level="ERROR", format="text")
    run = Run(options.model, flags, options.passes, options.out)

    async def within() -> None:
        async with asyncio.timeout(options.limit):
            await run.everything()

    try:
        with contextlib.suppress(TimeoutError):
            asyncio.run(within())
    except Exception as error:  # noqa: BLE001 - what was measured is reported all the same
        run.draft.note(f"ended early: {type(error).__name__}: {error}")
    path = run.save()
    for row in run.rows():
        print(f"{row.item:24} {row.plain:10,.0f} {row.deterministic:10,.0f} tok/s  {row.ratio:.3f}")
    print(f"different answers to one seeded request: {run.answers}; {path}", flush=True)
    return 0 if run.rows() else 1


if __name__ == "__main__":
    sys.exit(main())
