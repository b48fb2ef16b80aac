"""Where a process's time goes, by py-spy, which need not be there."""

from __future__ import annotations

import asyncio
import shutil
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Final

from inferbus.workers.stack.processes import spawn

PROGRAM: Final = "py-spy"
RATE: Final = 250
"""Samples a second."""
END_SECONDS: Final = 30.0
PARTS: Final = {
    "event loop": "asyncio/runners.py",
    "SGLang, tokenizer manager": "managers/tokenizer",
    "SGLang, OpenAI formatters": "entrypoints/openai",
    "SGLang, HTTP server": "entrypoints/http_server",
    "SGLang, the rest": "sglang/",
    "uvicorn, starlette, fastapi": "uvicorn/",
    "inferbus, NATS": "workers/bus/",
    "inferbus, engine": "workers/engine/",
    "inferbus, answers and jobs": "workers/",
    "schemas": "schemas/",
    "benchmark": "benchmarks/",
}
"""Parts of a program by a piece of the path in a profile's frame, the more special ones first."""


def available() -> bool:
    """Whether the profiler is on PATH."""
    return shutil.which(PROGRAM) is not None


async def profile(
    pid: int, work: Callable[[], Awaitable[object]], *, seconds: int, file: Path
) -> dict[str, float]:
    """Looks at a process while it works; see `shares`.

    Args:
        pid: Of the process.
        work: What it is given to do.
        seconds: How long it is looked at.
        file: For the samples.

    Raises:
        OSError: The profiler left no samples.
        TimeoutError: It did not end.
    """
    command = [PROGRAM, "record", "-r", str(RATE), "-d", str(seconds), "-f", "raw", "-o", str(file)]
    child = await spawn("profiler", [*command, "-p", str(pid)], log=file.with_suffix(".log"))
    try:
        await work()
        async with asyncio.timeout(END_SECONDS):
            await child.wait()
    finally:
        child.kill()
    return shares(await asyncio.to_thread(file.read_text))


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
