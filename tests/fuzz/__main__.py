"""Many inputs at every decoder, in several processes: `python -m tests.fuzz`.

`FUZZ_RUNS` inputs in all (1,000,000), from `FUZZ_SEED` (0).
"""

from __future__ import annotations

import os
import resource
import sys
import time
import traceback
from concurrent.futures import ProcessPoolExecutor

import msgspec

from tests.fuzz.targets import TARGETS, accepts, mutator


class Figures(msgspec.Struct, frozen=True):
    """Of one target in one process.

    Attributes:
        target: Its name.
        inputs: How many.
        accepted: Those that became a value.
        slowest: Seconds of CPU for the slowest input, its making included.
        memory: Bytes that the process has held at most.
        failure: The traceback of the input that ended otherwise than it should, with its number.
    """

    target: str
    inputs: int
    accepted: int
    slowest: float
    memory: int
    failure: str = ""


def fuzz(target: str, seed: int, runs: int) -> Figures:
    """Gives a target that many inputs."""
    make, accepted, slowest, failure, number = mutator(target, seed), 0, 0.0, "", 0
    for number in range(1, runs + 1):
        started = time.process_time()
        try:
            accepted += accepts(TARGETS[target], make)
        except Exception:  # noqa: BLE001 - whatever it is, it is what is looked for
            failure = f"input {number} of seed {seed}\n{traceback.format_exc()}"
            break
        slowest = max(slowest, time.process_time() - started)
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return Figures(target, number, accepted, slowest, memory, failure)


def main() -> int:
    """The command; returns its exit status."""
    runs, seed = int(os.environ.get("FUZZ_RUNS", "1000000")), int(os.environ.get("FUZZ_SEED", "0"))
    processes = os.cpu_count() or 1
    each = -(-runs // len(TARGETS) // processes)
    started = time.monotonic()
    say = sys.stdout.write
    with ProcessPoolExecutor(processes) as pool:
        jobs = [pool.submit(fuzz, name, seed + share, each) for name in TARGETS for share in range(processes)]
        figures = [job.result() for job in jobs]
    say(f"{'target':28}{'inputs':>10}{'accepted':>10}{'slowest, ms':>14}\n")
    for name in TARGETS:
        own = [found for found in figures if found.target == name]
        inputs, accepted = sum(found.inputs for found in own), sum(found.accepted for found in own)
        say(f"{name:28}{inputs:>10,}{accepted:>10,}{max(found.slowest for found in own) * 1e3:>14.1f}\n")
    total, memory = sum(found.inputs for found in figures), max(found.memory for found in figures)
    say(f"{total:,} inputs, {time.monotonic() - started:.0f} s, at most {memory / 1e6:.0f} MB a process\n")
    failures = [found for found in figures if found.failure]
    for found in failures:
        say(f"\n{found.target}: {found.failure}")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
