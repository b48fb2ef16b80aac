"""Prefill and decode apart, or both everywhere? The same GPUs, the same paced load, side by side.

    python -m benchmarks.disaggregation MODEL [--layouts both,pair,pair-pieces,kill] [--traces long,short]
                                        [--rates RATES] [--seconds S] [--pairs N] [--out DIR] [SGLang's flags]

`both` is two workers of that role; `pair` a prefill and a decode worker on the same two GPUs; `pair-pieces`
the same without the batched copy; `kill` the pair (and a spare, with `--spare`) with a worker killed in
mid-load. Where there is one GPU, its workers share it, and where there is none, the CPU: the same program, to
try it out. Layouts run one after the other, each with engines of its own. Whatever was measured is on disk
when the time is over. `python -m benchmarks.graphs --rates FILE` draws it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import msgspec

from benchmarks import handoffs, report
from benchmarks.handoffs import Handoffs
from benchmarks.killing import SETTINGS, Killing
from benchmarks.layouts import KV_TOKENS
from benchmarks.load import LoadFailed, Wire, encode
from benchmarks.machine import Watch
from benchmarks.report import Draft
from benchmarks.traces import TRACES, Goal, Outcome, Trace, arrivals
from inferbus.schemas.fleet import Role
from inferbus.schemas.subjects import Subjects
from inferbus.workers.client import Client
from inferbus.workers.engine.sglang.options import BATCHED_COPY
from inferbus.workers.observe import logs
from inferbus.workers.stack.flags import RESERVED, RESERVED_TOKENS, TOKENS
from inferbus.workers.stack.local import LocalStack

MODEL: Final = "m"
LAYOUTS: Final = ("both", "pair", "pair-pieces", "kill")
START_SECONDS: Final = 300.0
IDLE_SECONDS: Final = 60.0
WARM: Final = 16
PATIENCE: Final = {"INFERBUS_PREFILL_TIMEOUT": "60"}
"""A rate that is too high makes a queue of more seconds than a hand-off may take by default."""
ONE_THREAD: Final = {"OMP_NUM_THREADS": "1", "SGLANG_CPU_OMP_THREADS_BIND": "0"}
"""For engines that share a CPU."""


class Reading(msgspec.Struct, frozen=True, kw_only=True):
    """One layout under one rate of one trace.

    Attributes:
        layout: Of the workers.
        trace: Of the requests.
        rate: Requests a second that were sent.
        outcome: What became of them.
        handoffs: What prefill workers told; None where there are none.
        others: Cores that none of the fleet's processes used.
        stolen: Cores that the hypervisor kept.
    """

    layout: str
    trace: str
    rate: float
    outcome: Outcome
    handoffs: Handoffs | None
    others: float
    stolen: float


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """How it is done.

    Attributes:
        layouts: Of these, in this order.
        traces: Of the load.
        seconds: Of arrivals at each rate.
        goal: Of answers.
        seed: Of the load.
        pairs: Two workers each.
        spare: One more worker of the role that is killed.
        kill: That role.
        kill_rate: Live requests a second meanwhile, and as many jobs; of the last trace.
        tokens: Room of every KV cache; None: SGLang's choice, and a cap where a GPU is shared.
        silence: Seconds without a message after which a live request is given up.
        scripted: A script in place of engines.
    """

    layouts: list[str]
    traces: list[Trace]
    seconds: float
    goal: Goal
    seed: str
    pairs: int
    spare: bool
    kill: Role
    kill_rate: float
    tokens: int | None
    silence: float
    scripted: Path | None


def roles_of(name: str, options: Options) -> list[Role]:
    """The workers of a layout, in the order in which they get the GPUs."""
    if name == "both":
        return ["both"] * (2 * options.pairs)
    spare: list[Role] = [options.kill] if name == "kill" and options.spare else []
    prefill: list[Role] = ["prefill"] * options.pairs
    decode: list[Role] = ["decode"] * options.pairs
    return prefill + decode + spare


def placed(roles: Sequence[Role], gpus: int, tokens: int | None) -> list[list[str]]:
    """SGLang's flags for each worker: its GPU, the next one for each, and its room where a GPU is shared.

    Args:
        roles: Of the workers.
        gpus: How many there are; 0: the CPU.
        tokens: Room of every KV cache, if it is the same.
    """
    found = []
    for number, role in enumerate(roles):
        flags = ["--base-gpu-id", str(number % gpus)] if gpus else []
        shared = gpus > 0 and len(roles) > gpus
        room = tokens or (KV_TOKENS[role] if shared else None if gpus else TOKENS["cpu"])
        if room is not None:
            flags += ["--max-total-tokens", str(room)]
        if role == "decode" and (shared or not gpus):
            flags += [RESERVED, RESERVED_TOKENS]
        found.append(flags)
    return found


class Run:
    """One run of the program.

    Args:
        model: Folder.
        flags: SGLang's, for every engine.
        options: What is done.
        out: Folder for the report.
        logs: Folder for the workers' logs.
    """

    def __init__(self, model: str, flags: list[str], options: Options, *, out: Path, logs: Path) -> None:
        self._model = model
        self._flags = flags
        self._options = options
        self._logs = logs
        self._draft = Draft("disaggregation", out, quick=options.scripted is not None)
        self._gpus = 0 if os.environ.get("INFERBUS_CPU") == "1" else len(self._draft.machine.gpus)
        self._links = handoffs.links()
        self._ways: dict[str, Any] = {}
        self._bytes: int | None = None

    @property
    def done(self) -> bool:
        """Whether anything was measured."""
        return bool(self._draft.readings or self._draft.summary)

    async def layouts(self) -> None:
        """All of them, one after the other; one that fails is told of and leaves the others."""
        for name in self._options.layouts:
            try:
                async with self._fleet(name) as stack:
                    await (self._kill(stack) if name == "kill" else self._measure(name, stack))
            except Exception as error:  # noqa: BLE001 - what the other layouts give is wanted all the same
                self._draft.note(f"{name}: {type(error).__name__}: {error}")
            self.save()

    @asynccontextmanager
    async def _fleet(self, name: str) -> AsyncIterator[LocalStack]:
        options, began = self._options, time.monotonic()
        roles = roles_of(name, options)
        env: dict[str, str | None] = {**PATIENCE, **handoffs.TOLD}
        env |= {} if self._gpus else {"CUDA_VISIBLE_DEVICES": "", **ONE_THREAD}
        env |= {BATCHED_COPY: "0"} if name == "pair-pieces" else {}
        env |= SETTINGS if name == "kill" else {}
        self._draft.say(f"{name}: starting {', '.join(roles)} on {self._gpus or 'no'} GPU(s)")
        stack = LocalStack(
            self._model,
            model=MODEL,
            roles=roles,
            flags=self._flags,
            own_flags=placed(roles, self._gpus, options.tokens),
            env=env,
            scripted=options.scripted,
            directory=self._logs / name,
            ready_timeout=START_SECONDS,
            grace=1.0,
        )
        async with stack:
            self._draft.note(f"{name}: ready after {time.monotonic() - began:.0f} s")
            try:
                yield stack
            finally:
                if name != "both":
                    self._ways[name] = {each: handoffs.ways(log) for each, log in _logs(stack).items()}

    async def _measure(self, name: str, stack: LocalStack) -> None:
        reader = handoffs.Logs(_logs(stack))
        async with Client.connect(stack.url) as client:
            infos = await client.workers()
            self._bytes = next(filter(None, (handoffs.token_bytes(each.signature) for each in infos)), None)
            for trace in self._options.traces:
                await asyncio.to_thread(self._warm, stack.url, trace)
                await self._idle(name, client)
                reader.handoffs(trace.prompt, None)
                for rate in trace.rates:
                    await self._read(name, stack, trace, rate, reader)
                    await self._idle(name, client)

    def _warm(self, url: str, trace: Trace) -> None:
        bodies = [encode(body) for body in trace.bodies(WARM * self._options.pairs, seed="warm")]
        with Wire(url) as wire:
            wire.run(_SUBJECT, bodies, concurrency=len(bodies) // 2)

    async def _read(
        self, name: str, stack: LocalStack, trace: Trace, rate: float, reader: handoffs.Logs
    ) -> None:
        options = self._options
        due = arrivals(rate, options.seconds, seed=options.seed)
        bodies = [encode(body) for body in trace.bodies(len(due), seed=f"{options.seed} {rate}")]
        try:
            with (
                Wire(stack.url) as wire,
                Watch(
                    {}, sessions=[stack.server.child.pid, *(each.pid for each in stack.workers.values())]
                ) as watch,
            ):
                sent = await asyncio.to_thread(wire.paced, _SUBJECT, bodies, due, silence=options.silence)
        except (LoadFailed, OSError) as error:
            self._draft.note(f"{name}, {trace.name} at {rate:g}: {type(error).__name__}: {error}")
            return
        outcome = Outcome.of(sent, trace.answer, options.goal)
        told = None if name == "both" else reader.handoffs(trace.prompt, self._bytes)
        self._draft.readings.append(
            Reading(
                layout=name,
                trace=trace.name,
                rate=rate,
                outcome=outcome,
                handoffs=told,
                others=watch.others,
                stolen=watch.stolen,
            )
        )
        more = ""
        if told is not None and told.seconds is not None:
            more = f", hand-off {told.seconds.p50:.0f} (p99 {told.seconds.p99:.0f}) ms"
            more += f", {told.gbytes['p50']:.3g} GB/s" if told.gbytes else ""
        self._draft.say(f"{name}, {trace.name} at {rate:g}/s: {outcome.shown()}{more}")
        self.save()

    async def _idle(self, name: str, client: Client) -> None:
        """Waits until nothing of the last rate is left; the registry is a few seconds behind."""
        end = time.monotonic() + IDLE_SECONDS
        while any(each.load.busy or each.load.running for each in await client.workers()):
            if time.monotonic() > end:
                self._draft.note(f"{name}: still busy {IDLE_SECONDS:g} s after the last answer")
                return
            await asyncio.sleep(0.2)

    async def _kill(self, stack: LocalStack) -> None:
        options, trace = self._options, self._options.traces[-1]
        await asyncio.to_thread(self._warm, stack.url, trace)
        killing = Killing(
            stack,
            MODEL,
            trace,
            options.goal,
            rate=options.kill_rate,
            seconds=options.seconds,
            seed=options.seed,
        )
        roles = roles_of("kill", options)
        flags = placed(roles, self._gpus, options.tokens)[roles.index(options.kill)]
        found = await killing.run(options.kill, flags)
        self._draft.summary.append(found)
        self._draft.say(
            f"kill {found.role}: {found.whole} of {found.jobs} jobs whole, {found.lost} lost, "
            f"{found.results} results, attempts {found.attempts}; live: {found.live.shown()}; "
            f"successor ready after {found.replaced:.1f} s"
        )

    def save(self) -> Path:
        """Writes what there is so far."""
        options = msgspec.to_builtins(self._options, enc_hook=str)
        # A path of this machine says nothing.
        options["scripted"] = self._options.scripted is not None
        setup = {
            "flags": self._flags,
            "gpus": self._gpus,
            "options": options,
            "environment": {**PATIENCE, **handoffs.TOLD, **({} if self._gpus else ONE_THREAD)},
            "kill_environment": SETTINGS,
            "placed": {
                name: placed(roles_of(name, self._options), self._gpus, self._options.tokens)
                for name in self._options.layouts
            },
            "kv_bytes_a_token": self._bytes,
            "links": self._links,
            "ways": self._ways,
        }
        return self._draft.save(setup)


_SUBJECT: Final = Subjects().request(MODEL, "tokens")


def _logs(stack: LocalStack) -> dict[str, Path]:
    return {name: child.log for name, child in stack.workers.items() if name.startswith("prefill-")}


def read_options(arguments: Sequence[str] | None) -> tuple[argparse.Namespace, Options, list[str]]:
    """The program's own options, and SGLang's."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.disaggregation", description="See the module.", allow_abbrev=False
    )
    parser.add_argument("model", help="folder; anything where --scripted is given")
    parser.add_argument("--layouts", default=",".join(LAYOUTS))
    parser.add_argument("--traces", default=",".join(TRACES))
    parser.add_argument("--rates", help="requests a second, for every trace: 1,2,4")
    parser.add_argument(
        "--lengths", metavar="IN/OUT/SHARED", help="of the prompts, for every trace: 400/32/100"
    )
    parser.add_argument("--seconds", type=float, default=20.0, help="of arrivals at each rate")
    parser.add_argument(
        "--first", type=float, default=1.0, help="seconds to the first token of a good answer"
    )
    parser.add_argument("--gap", type=float, default=0.025, help="seconds between its tokens, p99")
    parser.add_argument("--seed", default="1")
    parser.add_argument("--pairs", type=int, default=1, help="two workers each; for more than two GPUs")
    parser.add_argument("--kill", choices=("prefill", "decode"), default="decode", help="whom")
    parser.add_argument("--kill-rate", type=float, default=4.0)
    parser.add_argument("--spare", action="store_true", help="one more worker of that role, from the start")
    parser.add_argument("--tokens", type=int, help="room of every KV cache")
    parser.add_argument("--silence", type=float, default=60.0)
    parser.add_argument("--scripted", type=Path, help="a script in place of engines")
    parser.add_argument("--out", type=Path, default=report.RESULTS / "disaggregation")
    parser.add_argument("--logs", type=Path, help="default: a folder of the former")
    parser.add_argument("--limit", type=float, default=3600.0, metavar="SECONDS")
    found, flags = parser.parse_known_args(arguments)
    traces = [TRACES[name] for name in found.traces.split(",")]
    if found.rates:
        rates = sorted(float(rate) for rate in found.rates.split(","))
        traces = [msgspec.structs.replace(trace, rates=rates) for trace in traces]
    if found.lengths:
        prompt, answer, shared = map(int, found.lengths.split("/"))
        traces = [
            msgspec.structs.replace(trace, prompt=prompt, answer=answer, shared=shared) for trace in traces
        ]
    layouts = found.layouts.split(",")
    if unknown := set(layouts) - set(LAYOUTS):
        parser.error(f"no layouts: {', '.join(sorted(unknown))}")
    options = Options(
        layouts=layouts,
        traces=traces,
        seconds=found.seconds,
        goal=Goal(first=found.first, gap=found.gap),
        seed=found.seed,
        pairs=found.pairs,
        spare=found.spare,
        kill=found.kill,
        kill_rate=found.kill_rate,
        tokens=found.tokens,
        silence=found.silence,
        scripted=found.scripted,
    )
    return found, options, flags


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures; what there is when the time is over is what is reported."""
    found, options, flags = read_options(arguments)
    logs.configure(level="ERROR", format="text")
    run = Run(found.model, flags, options, out=found.out, logs=found.logs or found.out / "logs")

    async def within() -> None:
        async with asyncio.timeout(found.limit):
            await run.layouts()

    try:
        asyncio.run(within())
    except TimeoutError:
        print(f"stopped after {found.limit:g} s", flush=True)
    print(json.dumps({"report": run.save().name, "measured": run.done}), flush=True)
    return 0 if run.done else 1


if __name__ == "__main__":
    sys.exit(main())
