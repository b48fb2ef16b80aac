"""Dynamo's runtime in the same loops, run by the Python of an environment that has it; see `loops`.

    PYTHON benchmarks/peer.py worker
    PYTHON benchmarks/peer.py loop STREAMS SECONDS worker=PID

The worker's handler yields one-token dictionaries, as Dynamo's engines do, and knows no model. Nothing of
inferbus is imported: the two need not have a Python in common. All addresses are the loopback's.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import uvloop

CHUNKS, WARM, ENDPOINT = 128, 1.0, "bench.echo.generate"
TICKS = os.sysconf("SC_CLK_TCK")
LOOPBACK = ("DYN_TCP_RPC_HOST", "DYN_TCP_RESPONSE_STREAM_HOST", "DYN_EVENT_PLANE_HOST", "DYN_SYSTEM_HOST")


def connect() -> Any:
    """The runtime on its TCP plane, with workers found by files in the folder `DYN_FILE_KV`."""
    for name in LOOPBACK:
        os.environ.setdefault(name, "127.0.0.1")
    os.environ.setdefault("DYN_LOG", "warn")
    from dynamo.runtime import DistributedRuntime

    loop = asyncio.get_running_loop()
    return DistributedRuntime(loop, "file", "tcp", response_plane="tcp", event_plane="zmq")


async def serve() -> None:
    """The worker, until it is ended."""

    async def generate(request: dict[str, int], context: Any) -> AsyncIterator[dict[str, Any]]:
        for number in range(request["chunks"]):
            if context.is_stopped():
                return
            yield {"index": 0, "token_ids": [number]}

    await connect().endpoint(ENDPOINT).serve_endpoint(generate, graceful_shutdown=False)


async def loop(streams: int, seconds: float, processes: dict[str, int]) -> dict[str, Any]:
    """One reading, with the fields of `benchmarks.looping.Loop`."""
    runtime = connect()
    client = await runtime.endpoint(ENDPOINT).client()
    await asyncio.wait_for(client.wait_for_instances(), 30)
    first: list[float] = []
    chunks, stop = 0, asyncio.Event()

    async def keep_open() -> None:
        nonlocal chunks
        while not stop.is_set():
            counted, sent, got = first, time.perf_counter(), 0
            async for _ in await client.round_robin({"chunks": CHUNKS}, annotated=False):
                if not got:
                    counted.append(time.perf_counter() - sent)
                got += 1
                chunks += 1
            if got != CHUNKS:
                raise RuntimeError(f"an answer had {got} chunks of {CHUNKS}")

    tasks = [asyncio.create_task(keep_open()) for _ in range(streams)]
    await asyncio.sleep(WARM)
    before, cpu, started = (
        {name: cpu_seconds(pid) for name, pid in processes.items()},
        cpu_seconds(),
        time.time(),
    )
    busy, stolen = machine_times()
    first, chunks = [], 0
    await asyncio.sleep(seconds)
    counted, times, took, mine = chunks, first, time.time() - started, cpu_seconds() - cpu
    busy, stolen = (now - then for now, then in zip(machine_times(), (busy, stolen), strict=True))
    theirs = {name: cpu_seconds(pid) - before[name] for name, pid in processes.items()}
    stop.set()
    await asyncio.gather(*tasks)
    runtime.shutdown()
    return {
        "tokens": counted,
        "seconds": took,
        "reader_us": round(mine / max(counted, 1) * 1e6, 2),
        "cpu_us": {name: round(each / max(counted, 1) * 1e6, 2) for name, each in theirs.items()},
        "first": quantiles(times),
        "others": max(0.0, round((busy - mine - sum(theirs.values())) / took, 3)),
        "stolen": round(stolen / took, 3),
    }


def cpu_seconds(pid: int | str = "self") -> float:
    """Processor time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


def machine_times() -> tuple[float, float]:
    """Busy and stolen processor seconds of the whole machine."""
    words = Path("/proc/stat").read_text().split("\n", 1)[0].split()
    user, nice, system, _idle, _wait, irq, softirq, stolen = map(int, words[1:9])
    return (user + nice + system + irq + softirq) / TICKS, stolen / TICKS


def quantiles(seconds: list[float]) -> dict[str, float] | None:
    """As `benchmarks.report.Quantiles`."""
    found = sorted(seconds)
    if not found:
        return None
    at = {f"p{share}": found[min(len(found) - 1, len(found) * share // 100)] * 1e3 for share in (50, 90, 99)}
    mean = sum(found) / len(found) * 1e3
    return {"n": len(found), "mean": round(mean, 3), **{name: round(value, 3) for name, value in at.items()}}


def main(arguments: Sequence[str]) -> None:
    """Serves, or takes one reading and prints it."""
    if arguments[0] == "worker":
        uvloop.run(serve())
        return
    _, streams, seconds, *named = arguments
    pids = {name: int(pid) for name, _, pid in (each.partition("=") for each in named)}
    print(json.dumps(uvloop.run(loop(int(streams), float(seconds), pids))), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
