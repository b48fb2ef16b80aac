"""`inferbus top`: a live view of the fleet."""

from __future__ import annotations

import asyncio
from typing import Any

import click
import msgspec

from inferbus.schemas.errors import BusUnavailable
from inferbus.workers.cli.options import Command, settings_options
from inferbus.workers.cli.running import with_client
from inferbus.workers.cli.text import print_json
from inferbus.workers.client import Client


@click.command(cls=Command)
@click.option(
    "--interval",
    type=click.FloatRange(min=1.0),
    default=2.0,
    show_default=True,
    help="Seconds between two readings.",
)
@click.option("--once", is_flag=True, help="Print one reading, with the rates of one interval, and end.")
@click.option("--json", "as_json", is_flag=True, help="Print every reading as a line of JSON.")
@settings_options("bus")
def top(interval: float, once: bool, as_json: bool, **options: Any) -> int:
    """Watch workers, queues, rates, batches and errors, until Ctrl-C.

    It only reads. One reading is about ten requests to the server and one question that each worker answers.
    """

    async def work(client: Client) -> int:
        from rich.console import Console
        from rich.live import Live

        from inferbus.workers.cli.screen import drawn
        from inferbus.workers.top import Collector

        collector, console = Collector(client), Console()
        now = await collector.snapshot()
        if once or as_json:
            while True:
                await asyncio.sleep(interval)
                now = await collector.snapshot()
                if as_json:
                    print_json(now)
                else:
                    console.print(drawn(now))
                if once:
                    return 0
        with Live(drawn(now), console=console, screen=console.is_terminal, auto_refresh=False) as live:
            while True:
                await asyncio.sleep(interval)
                try:
                    now = await collector.snapshot()
                except BusUnavailable as error:
                    if client.bus.closed.is_set():
                        raise
                    now = msgspec.structs.replace(now, rates={}, troubles=[error.message])
                live.update(drawn(now), refresh=True)

    return with_client(options, work)
