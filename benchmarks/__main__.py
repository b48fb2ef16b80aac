"""python -m benchmarks [plane|batch|engine|memory|endurance]... [--quick] [--out DIR] [--wait SECONDS]"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from rich.console import Console

from benchmarks import batch, engine, machine, memory, plane, report
from benchmarks.load import LoadFailed
from inferbus.workers.observe import logs
from inferbus.workers.stack.errors import StackError


class Benchmark(NamedTuple):
    """One of them."""

    measure: Callable[..., Coroutine[Any, Any, report.Report]]
    show: Callable[[Console, report.Report], None]


ALL: Final = {
    "plane": Benchmark(plane.measure, plane.show),
    "batch": Benchmark(batch.measure, batch.show),
    "engine": Benchmark(engine.measure, engine.show),
    "memory": Benchmark(memory.measure, memory.show),
    "endurance": Benchmark(memory.endurance, memory.show),
}
DEFAULT: Final = ("plane", "batch", "engine", "memory")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs benchmarks; 1 where one could not be finished."""
    parser = _parser()
    options = parser.parse_args(arguments)
    if unknown := set(options.names) - set(ALL):
        parser.error(f"no such benchmark: {', '.join(sorted(unknown))}; there are {', '.join(ALL)}")
    console = Console()
    logs.configure(level="ERROR", format="text")
    for name in options.names or DEFAULT:
        if options.wait and not machine.wait_until_quiet(options.wait):
            console.print(f"the machine is still busy after {options.wait:g} s; measuring all the same")
        console.print(f"[bold]{name}[/]: load {machine.load()[0]} before it", highlight=False)
        try:
            found = asyncio.run(ALL[name].measure(console, quick=options.quick))
        except (LoadFailed, StackError) as error:
            console.print(f"{name} failed: {error}", style="red", highlight=False)
            return 1
        ALL[name].show(console, found)
        report.show_aims(console, found.aims)
        console.print(f"written to {found.save(options.out)}", style="dim", highlight=False)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="See benchmarks/README.md.")
    parser.add_argument("names", nargs="*", metavar="BENCHMARK", help=_names())
    parser.add_argument("--quick", action="store_true", help="few and short readings, for trying it out")
    parser.add_argument("--out", type=Path, default=report.RESULTS, metavar="DIR", help="for the JSON files")
    parser.add_argument(
        "--wait", type=float, default=0.0, metavar="SECONDS", help="wait that long for the machine to be idle"
    )
    return parser


def _names() -> str:
    return f"{', '.join(ALL)}; default: {' '.join(DEFAULT)}"


if __name__ == "__main__":
    sys.exit(main())
