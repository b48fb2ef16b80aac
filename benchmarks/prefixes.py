"""What it brings to send lines of a batch near each other whose prompts begin alike.

    python -m benchmarks.prefixes [MODEL] [--prefixes N] [--lines N] [--out DIR] [SGLang's flags]

The lines of a file take turns between prompts' beginnings that have no room in the KV cache all together, as
questions about many documents do. The same worker, a real engine, answers such a file in its own order
(`--no-reorder`), and others, with other beginnings, as `inferbus batch run` does by itself; then both once
more. Without MODEL it is the tiny one, on the CPU.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec

from benchmarks import report
from benchmarks.disaggregation import ONE_THREAD
from benchmarks.report import Draft
from benchmarks.told import MODEL
from benchmarks.workload import IDS
from inferbus.workers.batch.runs import Options, begin, run
from inferbus.workers.client import Client
from inferbus.workers.observe import logs
from inferbus.workers.stack import models
from inferbus.workers.stack.flags import placement
from inferbus.workers.stack.local import LocalStack

PREFIX: Final = 512
"""Tokens of a beginning."""
OWN: Final = 32
"""Tokens of a prompt after it."""
ANSWER: Final = 4
PREFIXES: Final = 64
LINES: Final = 640
READY: Final = 300.0


class Reading(msgspec.Struct, frozen=True, kw_only=True):
    """One file.

    Attributes:
        order: `as read` or `grouped`.
        lines: Of the file.
        prefixes: Different beginnings.
        seconds: From the check of the file to its finished output.
        cached: Share of the prompts' tokens that were in the KV cache.
    """

    order: str
    lines: int
    prefixes: int
    seconds: float
    cached: float


def write(path: Path, salt: str, prefixes: int, lines: int) -> Path:
    """A file whose lines take turns between the beginnings."""
    draw = random.Random(salt)
    beginnings = [[draw.randrange(*IDS) for _ in range(PREFIX)] for _ in range(prefixes)]
    with path.open("wb") as file:
        for number in range(lines):
            ids = [*beginnings[number % prefixes], *(draw.randrange(*IDS) for _ in range(OWN))]
            body = {"model": MODEL, "token_ids": ids, "max_tokens": ANSWER, "ignore_eos": True}
            line = {"custom_id": f"line-{number}", "method": "POST", "url": "/v1/tokens", "body": body}
            file.write(msgspec.json.encode(line) + b"\n")
    return path


async def measure(draft: Draft, model: str, flags: Sequence[str], prefixes: int, lines: int) -> None:
    """Both orders in turn, on one engine."""
    place = placement(shared=True)
    env = {**place.env, **(ONE_THREAD if place.where == "the CPU" else {})}
    stack = LocalStack(
        model, model=MODEL, roles=("both",), flags=[*place.flags, *flags], env=env, ready_timeout=READY
    )
    draft.say(f"starting a worker on {place.where}")
    with tempfile.TemporaryDirectory(prefix="inferbus-bench-") as folder:
        async with stack, Client.connect(stack.url) as client:
            for number, order in enumerate(("warm", "as read", "grouped", "grouped", "as read")):
                count = prefixes if order == "warm" else lines
                path = Path(folder, f"{number}.jsonl")
                source = await asyncio.to_thread(write, path, str(number), prefixes, count)
                began = time.perf_counter()
                options = Options(reorder=order == "grouped")
                record = await run(client, await begin(client, source, options))
                seconds, usage = time.perf_counter() - began, record.usage
                found = Reading(
                    order=order,
                    lines=record.counts.succeeded,
                    prefixes=prefixes,
                    seconds=round(seconds, 2),
                    cached=round(usage.cached_tokens / usage.input_tokens, 4),
                )
                if order != "warm":
                    draft.readings.append(found)
                draft.say(f"{order}: {found.lines} lines in {seconds:.1f} s, {found.cached:.1%} cached")
    draft.summary = draft.readings
    setup = {"prefix": PREFIX, "own": OWN, "answer": ANSWER, "flags": [*place.flags, *flags]}
    draft.say(f"written to {draft.save({**setup, 'where': place.where, 'environment': env})}")


def main(arguments: Sequence[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.prefixes", description="See the module.", allow_abbrev=False
    )
    parser.add_argument("model", nargs="?", help="folder; default: the tiny one")
    parser.add_argument("--prefixes", type=int, default=PREFIXES, help="different beginnings of prompts")
    parser.add_argument("--lines", type=int, default=LINES, help="of a file")
    parser.add_argument("--out", type=Path, default=report.RESULTS, metavar="DIR", help="for the JSON file")
    options, flags = parser.parse_known_args(arguments)
    logs.configure(level="ERROR", format="text")
    model = options.model or str(models.ensure("tiny"))
    draft = Draft("prefixes", options.out)
    asyncio.run(measure(draft, model, flags, options.prefixes, options.lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
