"""python -m tests.soak: the soak by itself; exit status 0 when nothing was lost and nothing doubled."""

from __future__ import annotations

import asyncio
import os
import sys

import uvloop
from rich.console import Console

from inferbus.workers.observe import logs
from tests.soak.soak import Settings, Soak


def main() -> int:
    """Runs it as the environment says."""
    logs.configure(level="CRITICAL")
    # Wide enough for the table, wherever it goes.
    console = Console(width=None if sys.stdout.isatty() else 160)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return 1 if runner.run(Soak(Settings.of(os.environ), console).run()) else 0


if __name__ == "__main__":
    sys.exit(main())
