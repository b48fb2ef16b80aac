"""The bare engine of `benchmarks.gpu`, in a process of its own that is told by files what to do.

    python -m benchmarks.told FOLDER --model-path MODEL [SGLang's flags]

`ready` in the folder says that it can be asked; `N.order` holds the N-th item, `N.answer` what it gave.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from benchmarks.bare import Bare, read_arguments
from benchmarks.load import LoadFailed, Sent, encode
from benchmarks.machine import Watch
from benchmarks.readings import Item, Taken
from benchmarks.workload import Plan

MODEL: Final = "m"
PLAN: Final = "BENCHMARK_PLAN"
"""Variable that says how long prompts and answers are."""
LOOK_EVERY: Final = 0.02


class Answer(msgspec.Struct, kw_only=True):
    """What became of an order: figures, or why there are none."""

    taken: Taken | None = None
    error: str = ""


class Told(Bare):
    """The bare engine as this benchmark asks it."""

    def __init__(self, arguments: Any, plan: Plan) -> None:
        super().__init__(arguments)
        self._plan = plan

    async def take(self, item: Item, number: int) -> Taken:
        """Measures."""
        bodies = item.bodies(self._plan, number)
        with Watch({"main": os.getpid()}, sessions=[os.getsid(0)]) as watch:
            match item.what:
                case "streams":
                    taken = await self._streams(item, [encode(body) for body in bodies])
                case "paced":
                    taken = await self._paced(item, [encode(body) for body in bodies], item.due(number))
                case _:
                    taken = await self.whole(bodies)
        taken.cpu, taken.others, taken.stolen = watch.cpu["main"], watch.others, watch.stolen
        return taken

    async def _streams(self, item: Item, bodies: list[bytes]) -> Taken:
        taken = Taken(seconds=0.0, tokens=len(bodies) * self._plan.answer)
        left, started = iter(bodies), time.perf_counter()

        async def one_after_another() -> None:
            # Counts from when it was due: SGLang converts a chat on the loop, and others wait for that.
            sent = started
            for body in left:
                times = await self._times(item, body)
                taken.first.append(times[0] - sent)
                taken.moments.append(times)
                taken.messages += len(times)
                sent = times[-1]

        async with asyncio.TaskGroup() as group:
            for _ in range(item.concurrency):
                group.create_task(one_after_another())
        taken.seconds = time.perf_counter() - started
        return taken

    async def _paced(self, item: Item, bodies: list[bytes], due: list[float]) -> Taken:
        started, requests = time.perf_counter(), [Sent(due=moment) for moment in due]

        async def ask(request: Sent, body: bytes) -> None:
            request.sent = time.perf_counter() - started
            request.moments = [moment - started for moment in await self._times(item, body)]
            request.fate = "ok"

        async with asyncio.TaskGroup() as group:
            for request, body in zip(requests, bodies, strict=True):
                await asyncio.sleep(max(0.0, request.due - (time.perf_counter() - started)))
                group.create_task(ask(request, body))
        return Taken.of(requests, self._plan.answer)

    async def _times(self, item: Item, body: bytes) -> list[float]:
        """When the messages of an answer came."""
        ask, times, last = self.tokens if item.kind == "tokens" else self.chat, list[float](), None
        async for message in await ask(body):
            times.append(time.perf_counter())
            last = message
        if item.kind == "tokens":
            whole = last is not None and last["meta_info"]["completion_tokens"] == self._plan.answer
        else:
            whole = last == "data: [DONE]\n\n"
        if not whole:
            raise LoadFailed("an answer was not whole")
        return times


def write(file: Path, data: bytes) -> None:
    """In one step, so that whoever waits for the file finds it whole."""
    part = file.with_suffix(".part")
    part.write_bytes(data)
    part.rename(file)


async def serve(bare: Told, orders: Path) -> None:
    """Does what the files say until this process is ended."""
    write(orders / "ready", b"")
    number = 1
    while True:
        order = orders / f"{number}.order"
        if not order.exists():
            await asyncio.sleep(LOOK_EVERY)
            continue
        item, salt = msgspec.json.decode(order.read_bytes(), type=tuple[Item, int])
        try:
            answer = Answer(taken=await bare.take(item, salt))
        except Exception as error:  # noqa: BLE001 - whoever ordered it is told, and goes on
            answer = Answer(error=f"{type(error).__name__}: {error}")
        write(orders / f"{number}.answer", msgspec.json.encode(answer))
        number += 1


def main(arguments: Sequence[str]) -> int:
    """Starts the engine and serves."""
    orders, *argv = arguments
    plan = msgspec.json.decode(os.environ[PLAN], type=Plan)
    bare = Told(read_arguments(argv, MODEL), plan)
    try:
        asyncio.run(serve(bare, Path(orders)))
    finally:
        bare.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
