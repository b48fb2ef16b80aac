"""Runs a command's coroutine; every failure is one line and an exit code, never a traceback."""

from __future__ import annotations

import asyncio
import os
import sys
from asyncio import AbstractEventLoop
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import IO, Any, Final

import click

from inferbus.schemas.errors import BusUnavailable, InferbusError, NoWorker
from inferbus.workers.cli.options import settings_of
from inferbus.workers.cli.tables import printable
from inferbus.workers.client import Client, TimedOut
from inferbus.workers.client.models import unserved
from inferbus.workers.config import Settings
from inferbus.workers.observe import logs

EXIT_FAILED: Final = 1
EXIT_USAGE: Final = 2
EXIT_NATS: Final = 3
EXIT_NO_WORKER: Final = 4
EXIT_TIMED_OUT: Final = 5
EXIT_INTERRUPTED: Final = 130

OWNER_ENV: Final = "INFERBUS_OWNER"

Work = Callable[[Client], Coroutine[Any, Any, int]]
"""A command's coroutine: takes a connected client, returns the exit code."""


class CommandFailed(click.ClickException):
    """A command cannot do its work; one line says why."""

    exit_code = EXIT_FAILED

    def show(self, file: IO[Any] | None = None) -> None:
        """Prints the line on standard error."""
        print_error(self.message)


def exit_code(error: InferbusError) -> int:
    """The exit code of an error."""
    for kind, code in ((NoWorker, EXIT_NO_WORKER), (TimedOut, EXIT_TIMED_OUT), (BusUnavailable, EXIT_NATS)):
        if isinstance(error, kind):
            return code
    return EXIT_FAILED


def print_error(error: InferbusError | str) -> None:
    """Prints an error as one line on standard error."""
    note(error if isinstance(error, str) else f"{error.code}: {error.message}")


def warn(text: str) -> None:
    """Prints a warning as one line on standard error."""
    note(f"warning: {text}")


def note(text: str) -> None:
    """Prints a line on standard error."""
    click.echo(printable(f"inferbus: {' '.join(text.split())}"), err=True)


def with_client(flags: dict[str, Any], work: Work) -> int:
    """Runs a coroutine with a connected client; returns the exit code.

    Args:
        flags: The command's options; settings and `owner` are removed from it.
        work: The coroutine function.
    """
    owner = flags.pop("owner", None)
    return run(settings_of(flags), work, **({"owner": owner} if owner else {}))


def run(settings: Settings, work: Work, **options: Any) -> int:
    """Runs a coroutine with a client connected by these settings; returns the exit code."""
    logs.configure(level="CRITICAL", format="text")

    async def connected() -> int:
        async with Client.connect(settings.bus, name="inferbus cli", **options) as client:
            return await work(client)

    return run_coroutine(connected)


def run_coroutine(
    work: Callable[[], Coroutine[Any, Any, int]], *, new_loop: Callable[[], AbstractEventLoop] | None = None
) -> int:
    """Runs a coroutine, and turns what it raises into a line and an exit code.

    Args:
        work: The coroutine function.
        new_loop: Makes the event loop; None: asyncio's own.
    """
    try:
        with asyncio.Runner(loop_factory=new_loop) as runner:
            return runner.run(work())
    except InferbusError as error:
        print_error(error)
        return exit_code(error)
    except KeyboardInterrupt:
        print_error("interrupted")
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader of the output has closed it.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILED


async def model_or_only(client: Client, model: str | None) -> str:
    """The model named, or the only one that is served.

    Raises:
        NoWorker: No model is served.
        click.UsageError: Several are.
    """
    if model is not None:
        return model
    served = await client.models()
    if not served:
        raise NoWorker("no worker is ready; see `inferbus workers`")
    if len(served) > 1:
        raise click.UsageError(f"name one of the models that are served: {', '.join(served)}")
    return served[0]


@asynccontextmanager
async def explaining_absence(client: Client, model: str) -> AsyncIterator[None]:
    """Has `NoWorker` say what is served, where nobody serves this model.

    Raises:
        NoWorker: From the block.
    """
    try:
        yield
    except NoWorker:
        served = await client.models()
        if model in served:
            raise
        raise NoWorker(unserved(model, served)) from None
