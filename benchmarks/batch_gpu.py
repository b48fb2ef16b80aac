"""A batch file against the bare engine that is given the whole list, on one GPU or on the CPU.

    python -m benchmarks.batch_gpu MODEL [--lines N] [--url URL] [--passes N] [--limit SECONDS] [--out DIR]
                                   [--quick] [SGLang's flags for both engines]

Lines have mixed lengths: lognormal around 256 tokens in and 96 out. `batch` is `inferbus batch run` on an
OpenAI batch file, the whole command from its start to its end, with one worker of the role `both` and an
embedded NATS server (`sync_interval: always`). `bare` is `Engine.async_generate` with the same prompts as one
list, asked by a program that has them in memory already. So the first wave, the last one and the start of the
command all count against us; what a command takes that only connects is told beside it.

Both engines start at once and stay, with the same flags, and take turns. Whatever was measured is on disk
when the time is over.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any, Final

import msgspec

from benchmarks import report
from benchmarks.disaggregation import ONE_THREAD
from benchmarks.gpu import ROOM
from benchmarks.layouts import BareLayout, FleetLayout, Layout
from benchmarks.load import LoadFailed
from benchmarks.machine import Watch
from benchmarks.readings import Item, Reading, Taken
from benchmarks.report import Draft
from benchmarks.told import MODEL
from benchmarks.workload import Plan
from inferbus.workers.batch.lines import KINDS
from inferbus.workers.observe import logs
from inferbus.workers.stack.flags import TOKENS, placement
from inferbus.workers.stack.local import PROGRAM
from inferbus.workers.stack.processes import spawn

WANTED: Final = 0.97
"""Of the bare engine's time."""
LINES: Final = 2048
SPREAD: Final = 0.8
FULL: Final = Plan(passes=2, shapes=[], prompt=256, answer=96, spread=SPREAD)
QUICK: Final = Plan(passes=1, shapes=[], prompt=24, answer=12, spread=SPREAD)
QUICK_LINES: Final = 96
WARM: Final = 64
"""Lines before anything is measured."""
BATCH_SECONDS: Final = 240.0
URLS: Final = ("/v1/completions", "/v1/tokens")


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """What came of it, in seconds.

    Attributes:
        bare: The engine's time for the list, of each pass.
        batch: The command's time for the file.
        ratio: The median of the former to that of the latter.
        command: What a command takes that connects and does nothing.
        ratio_running: The ratio without that.
    """

    bare: list[float]
    batch: list[float]
    ratio: float
    command: float
    ratio_running: float


class BatchLayout(FleetLayout):
    """One worker behind NATS, asked by the command.

    Args:
        model: Folder.
        flags: SGLang's.
        env: For the worker.
        plan: Lengths.
        folder: For logs, files and streams.
        url: Of the lines.
    """

    def __init__(
        self, model: str, *, flags: list[str], env: dict[str, str | None], plan: Plan, folder: Path, url: str
    ) -> None:
        super().__init__(
            "batch",
            model,
            roles=("both",),
            flags=flags,
            role_flags={},
            env=env,
            plan=plan,
            folder=folder,
        )
        self._url = url
        self._folder = folder
        self._files = 0

    async def take(self, item: Item, number: int) -> Taken:
        """Runs a file of the item's requests."""
        bodies, self._files = item.bodies(self._plan, number), self._files + 1
        source = self._folder / f"{self._files}.jsonl"
        await asyncio.to_thread(self._write, source, bodies)
        sessions = [self._stack.server.child.pid, self.pid]
        with Watch({"main": self.pid}, sessions=sessions) as watch:
            await self._command("run", str(source))
        tokens = await asyncio.to_thread(self._tokens, source.with_name(f"{source.stem}.output.jsonl"))
        if tokens != sum(body["max_tokens"] for body in bodies):
            raise LoadFailed(f"{tokens} tokens came of {len(bodies)} lines: {source}")
        return Taken(
            seconds=watch.seconds,
            tokens=tokens,
            cpu=watch.cpu["main"],
            others=watch.others,
            stolen=watch.stolen,
        )

    async def connected(self) -> float:
        """Seconds that a command takes which connects and does nothing."""
        began = time.perf_counter()
        await self._command("ls")
        return time.perf_counter() - began

    async def _command(self, *words: str) -> None:
        log = self._folder / "command.log"
        child = await spawn("batch", [*PROGRAM, "batch", *words, "--nats-url", self._stack.url], log=log)
        try:
            async with asyncio.timeout(BATCH_SECONDS):
                if await child.wait():
                    raise child.exited()
        finally:
            await child.stop()

    def _write(self, source: Path, bodies: Sequence[dict[str, Any]]) -> None:
        ids = "token_ids" if KINDS[self._url] == "tokens" else "prompt"
        with source.open("wb") as file:
            for number, body in enumerate(bodies):
                made = {"model": MODEL, ids: body["token_ids"], **body}
                if ids != "token_ids":
                    del made["token_ids"]
                line = {"custom_id": f"line-{number}", "method": "POST", "url": self._url, "body": made}
                file.write(msgspec.json.encode(line) + b"\n")

    def _tokens(self, output: Path) -> int:
        decode = msgspec.json.Decoder(_Line).decode
        with output.open("rb") as file:
            return sum(decode(line).response.body.usage.completion_tokens for line in file)


class _Usage(msgspec.Struct):
    completion_tokens: int


class _Body(msgspec.Struct):
    usage: _Usage


class _Response(msgspec.Struct):
    body: _Body


class _Line(msgspec.Struct):
    response: _Response


class Run:
    """One run of the program.

    Args:
        model: Folder.
        flags: SGLang's, for both engines.
        plan: Lengths and passes.
        lines: Of a file.
        url: Of its lines.
        out: Folder for the report.
        quick: Whether this only tries it out.
    """

    def __init__(
        self, model: str, flags: list[str], plan: Plan, *, lines: int, url: str, out: Path, quick: bool
    ) -> None:
        place = placement(shared=True)
        gpu = place.where != "the CPU"
        self._env = {**place.env, **({} if gpu else ONE_THREAD)}
        self._flags = [*flags, "--max-total-tokens", str(ROOM[2]["both"] if gpu else TOKENS["cpu"])]
        self._plan = plan
        self._item = Item(what="whole", requests=lines)
        self._url = url
        self._command: float | None = None
        self.draft = Draft("batch-gpu", out, quick=quick)
        folder = out.absolute() / "logs"
        self._bare = BareLayout(model, self._flags, self._env, plan, folder)
        self._batch = BatchLayout(
            model, flags=self._flags, env=self._env, plan=plan, folder=folder / str(os.getpid()), url=url
        )

    async def everything(self) -> None:
        """Starts both and lets them take turns."""
        layouts: list[Layout] = [self._bare, self._batch]
        try:
            self.draft.say("starting both engines")
            async with asyncio.TaskGroup() as group:
                for layout in layouts:
                    group.create_task(layout.start())
            self.draft.note("both engines are ready")
            warm = Item(what="whole", requests=WARM)
            for layout in layouts:
                await layout.take(warm, -1)
            self._command = await self._batch.connected()
            for number in range(self._plan.passes):
                # The other one first in every second pass, so that none always has the warmer chip.
                for layout in layouts if number % 2 == 0 else layouts[::-1]:
                    taken = await layout.take(self._item, number)
                    found = taken.reading("batch", layout.name, self._item, number, self._plan.answer)
                    self.draft.readings.append(found)
                    self.draft.say(
                        f"{layout.name}: {found.seconds:.2f} s, {found.rate:,.0f} tok/s, "
                        f"{found.cpu_us:.0f} us CPU, others {found.others:.2f}"
                    )
                    self.save()
        finally:
            await asyncio.gather(*(layout.stop() for layout in layouts), return_exceptions=True)

    def row(self) -> Row | None:
        """What there is so far."""
        readings: list[Reading] = self.draft.readings
        bare, batch = (
            [each.seconds for each in readings if each.layout == name] for name in ("bare", "batch")
        )
        if not bare or not batch or self._command is None:
            return None
        ours = median(batch)
        return Row(
            bare=bare,
            batch=batch,
            ratio=round(median(bare) / ours, 4),
            command=round(self._command, 2),
            ratio_running=round(median(bare) / (ours - self._command), 4),
        )

    def save(self) -> Path:
        """Writes what there is so far."""
        row = self.row()
        self.draft.summary = [] if row is None else [row]
        setup = {
            "flags": self._flags,
            "environment": self._env,
            "plan": self._plan,
            "lines": self._item.requests,
        }
        return self.draft.save({**setup, "url": self._url})


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures; what there is when the time is over is what is reported."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.batch_gpu", description="See the module.", allow_abbrev=False
    )
    parser.add_argument("model", help="folder")
    parser.add_argument("--lines", type=int, help=f"of the file, default {LINES}")
    parser.add_argument("--url", choices=URLS, default=URLS[0], help="of the lines")
    parser.add_argument("--passes", type=int, default=FULL.passes)
    parser.add_argument("--out", type=Path, default=report.RESULTS / "batch-gpu", metavar="DIR")
    parser.add_argument("--limit", type=float, default=390.0, metavar="SECONDS")
    parser.add_argument("--quick", action="store_true", help="few short lines, to see that it runs")
    options, flags = parser.parse_known_args(arguments)
    logs.configure(level="ERROR", format="text")
    run = Run(
        options.model,
        flags,
        msgspec.structs.replace(QUICK if options.quick else FULL, passes=options.passes),
        lines=options.lines or (QUICK_LINES if options.quick else LINES),
        url=options.url,
        out=options.out,
        quick=options.quick,
    )

    async def within() -> None:
        async with asyncio.timeout(options.limit):
            await run.everything()

    try:
        with contextlib.suppress(TimeoutError):
            asyncio.run(within())
    except Exception as error:  # noqa: BLE001 - what was measured is reported all the same
        run.draft.note(f"ended early: {type(error).__name__}: {error}")
    path = run.save()
    row = run.row()
    if row is None:
        print(f"nothing was measured: {path}", flush=True)
        return 1
    met = "met" if row.ratio >= WANTED else "falls short"
    print(f"bare   {' '.join(f'{seconds:.2f}' for seconds in row.bare)} s")
    print(
        f"batch  {' '.join(f'{seconds:.2f}' for seconds in row.batch)} s, of it {row.command:.2f} s starting"
    )
    print(
        f"ratio  {row.ratio:.3f} (aim {WANTED}: {met}), without the start {row.ratio_running:.3f}; {path}",
        flush=True,
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
