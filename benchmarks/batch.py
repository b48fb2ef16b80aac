"""Batch files against a plain client: `python -m benchmarks.batch [--lines N ...] [--workers N]`.

The engines are scripted and answer at once, so what is measured is the message plane: submission, bundles,
results, output files, each synced (`sync_interval: always`). Beside it, in the same run, a loop over live
requests with `asyncio.gather` and a semaphore, which stores nothing. Prints JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import resource
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Final

from inferbus.schemas.fleet import Role
from inferbus.workers.client import Client
from inferbus.workers.stack.local import LocalStack
from inferbus.workers.stack.processes import spawn

MODEL: Final = "scripted"
PLAIN_LINES: Final = 5000
"""Requests of the plain loop, which keeps them all in memory."""

_SCRIPT: Final = (
    "tokenizer = false\nvocabulary = 32768\nmax_running = 256\n[[rules]]\nlength = 16\nper_delta = 16\n"
)
_CHILD: Final = """
import asyncio, json, resource, sys, time
from pathlib import Path
from inferbus.workers.batch.runs import Options, begin, run
from inferbus.workers.client import Client
async def main(url, source, shared):
    async with Client.connect(url) as client:
        began = time.monotonic()
        begun = await begin(client, Path(source), Options(shared=bool(shared)))
        checked = time.monotonic()
        record = await run(client, begun)
        ended = time.monotonic()
    used = resource.getrusage(resource.RUSAGE_SELF)
    print(json.dumps({"checking_s": checked - began, "running_s": ended - checked,
        "succeeded": record.counts.succeeded, "cpu_s": used.ru_utime + used.ru_stime,
        "peak_mib": used.ru_maxrss / 1024}))
asyncio.run(main(*sys.argv[1:]))
"""


async def measure(
    sizes: list[int], workers: int, prompt: int, *, shared: bool = False
) -> list[dict[str, Any]]:
    """One reading for each size, the plain loop first."""
    readings: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="inferbus-bench-") as name:
        folder = Path(name)
        script = folder / "script.toml"
        await asyncio.to_thread(script.write_text, _SCRIPT)
        roles: list[Role] = ["both"] * workers
        async with LocalStack("", model=MODEL, roles=roles, scripted=script) as stack:
            server = stack.server.child.pid
            readings.append(await _plain(stack.url, prompt))
            for lines in sizes:
                readings.append(await _batch(stack, folder, lines, prompt, server))
                if shared:
                    readings.append(await _batch(stack, folder, lines, prompt, server, shared=True))
    return readings


async def _batch(
    stack: LocalStack, folder: Path, lines: int, prompt: int, server: int, *, shared: bool = False
) -> dict[str, Any]:
    way = "batch, shared" if shared else "batch"
    source = folder / f"{lines}-{way}.jsonl"
    await asyncio.to_thread(_write, source, lines, prompt)
    before = _resident(server)
    peak, disk = before, 0
    log = source.with_suffix(".log")
    child = await spawn(
        "batch", [sys.executable, "-c", _CHILD, stack.url, str(source), "shared" * shared], log=log
    )
    waiting = asyncio.ensure_future(child.wait())
    while not waiting.done():
        peak, disk = (
            max(peak, _resident(server)),
            max(disk, await asyncio.to_thread(_size, stack.server.store)),
        )
        await asyncio.wait({waiting}, timeout=0.5)
    found: dict[str, Any] = json.loads((await asyncio.to_thread(log.read_text)).splitlines()[-1])
    return {
        "way": way,
        "lines": lines,
        **{key: round(value, 1) for key, value in found.items()},
        "lines_per_s": round(lines / found["running_s"], 1),
        "server_before_mib": before,
        "server_peak_mib": peak,
        "server_after_mib": _resident(server),
        "store_peak_mib": disk >> 20,
        "store_after_mib": await asyncio.to_thread(_size, stack.server.store) >> 20,
    }


async def _plain(url: str, prompt: int) -> dict[str, Any]:
    """The loop that people write: a semaphore, gather, and a list of answers."""
    slots = asyncio.Semaphore(64)
    async with Client.connect(url) as client:

        async def one(number: int) -> Any:
            async with slots:
                return await client.tokens(MODEL, [number % 30000] * prompt, max_tokens=16, stream=False)

        before = resource.getrusage(resource.RUSAGE_SELF)
        began = time.monotonic()
        await asyncio.gather(*map(one, range(PLAIN_LINES)))
        seconds = time.monotonic() - began
        after = resource.getrusage(resource.RUSAGE_SELF)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {
        "way": "asyncio.gather, live, nothing stored",
        "lines": PLAIN_LINES,
        "running_s": round(seconds, 1),
        "lines_per_s": round(PLAIN_LINES / seconds, 1),
        "cpu_s": round(cpu, 1),
    }


def _write(path: Path, lines: int, prompt: int) -> None:
    with path.open("w") as file:
        for number in range(lines):
            body = {"model": MODEL, "token_ids": [number % 30000] * prompt, "max_tokens": 16}
            line = {"custom_id": f"line-{number}", "method": "POST", "url": "/v1/tokens", "body": body}
            file.write(json.dumps(line) + "\n")


def _resident(pid: int) -> int:
    """Memory of a process in MiB."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") >> 20


def _size(folder: Path) -> int:
    total = 0
    for root, _, names in os.walk(folder):
        for name in names:
            try:
                total += (Path(root) / name).stat().st_size
            except FileNotFoundError:
                continue  # The server has removed it meanwhile.
    return total


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.batch", description=__doc__)
    parser.add_argument("--lines", type=int, nargs="+", default=[10_000, 100_000])
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--prompt", type=int, default=64, help="token ids of a prompt")
    parser.add_argument("--shared", action="store_true", help="measure batches that are shared as well")
    arguments = parser.parse_args()
    readings = measure(arguments.lines, arguments.workers, arguments.prompt, shared=arguments.shared)
    for reading in asyncio.run(readings):
        print(json.dumps(reading))


if __name__ == "__main__":
    main()
