"""`inferbus gateway`: OpenAI's HTTP API in front of the bus."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from typing import Any

import click

from inferbus.workers.cli.options import Command, settings_of, settings_options
from inferbus.workers.cli.prerequisites import check_gateway
from inferbus.workers.cli.running import run_coroutine
from inferbus.workers.config import ConfigError, Settings
from inferbus.workers.observe import logs


@click.command(cls=Command)
@settings_options("bus", "gateway")
def gateway(**flags: Any) -> int:
    """Serve OpenAI's HTTP API until it is stopped.

    SIGTERM lets open requests finish. Without API keys it listens on a loopback address only. Any number of
    gateways run side by side: they keep no state.
    """
    settings = settings_of(flags)
    check_gateway()
    logs.configure()
    try:
        return run_coroutine(lambda: _serve(settings), new_loop=_new_loop())
    except ConfigError as error:
        raise click.UsageError(str(error)) from None


def _new_loop() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """uvloop's, which takes a third off the way of a request and of a chunk; there is none for Windows."""
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop


async def _serve(settings: Settings) -> int:
    from inferbus.workers.gateway.server import quiet, run

    quiet()
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    await run(settings, stop, listening=lambda url: click.echo(f"listening on {url}", err=True))
    return 0
