"""`inferbus workers` and `health`: the announced workers, what they do, and whether one is ready."""

from __future__ import annotations

import socket
import textwrap
from typing import Any, Final, get_args

import click

from inferbus.schemas.fleet import Role, WorkerInfo
from inferbus.workers.bus.fleet.condition import examine
from inferbus.workers.cli.options import Command, settings_options
from inferbus.workers.cli.queues import paused_lines
from inferbus.workers.cli.running import EXIT_FAILED, print_error, warn, with_client
from inferbus.workers.cli.tables import print_table, printable
from inferbus.workers.cli.text import print_json
from inferbus.workers.client import Client

LONGEST_REASON: Final = 300


@click.command(cls=Command)
@click.option("--json", "as_json", is_flag=True, help="Print the announcements as JSON.")
@settings_options("bus")
def workers(as_json: bool, **options: Any) -> int:
    """List the workers."""

    async def work(client: Client) -> int:
        announced = await client.workers()
        if as_json:
            print_json(announced)
        elif announced:
            columns = ("model", "role", "worker", "state", "busy", "queued", "kv", "kinds", "engine", "host")
            print_table(columns, map(_row, announced))
        else:
            click.echo("no worker is announced", err=True)
        if not as_json:
            lines = await paused_lines(client.bus)
            lines += [f"warning: {each.text}" for each in (await examine(client.bus, announced)).troubles]
            for line in lines if announced else []:
                click.echo(printable(line), err=True)
        return 0

    return with_client(options, work)


@click.command(cls=Command)
@click.option("--worker", metavar="ID", envvar="INFERBUS_WORKER", help="This worker.  [env INFERBUS_WORKER]")
@click.option("--here", is_flag=True, help="A worker on this host.")
@click.option("--model", metavar="NAME", help="A worker of this model.")
@click.option("--role", type=click.Choice(get_args(Role)), help="A worker of this role.")
@settings_options("bus")
def health(worker: str | None, here: bool, model: str | None, role: str | None, **options: Any) -> int:
    """Tell whether a worker is ready.

    Exits with 0 if NATS answers and a matching worker is ready, else with 1 and one line that says why.
    Without options any worker counts. The health of all (neither --worker nor --here) includes the streams:
    one that is missing or full, or has lost a consumer, is a failure, one that is nearly full a warning.
    """
    wanted = {"worker": worker, "model": model, "role": role, "host": socket.gethostname() if here else None}

    async def work(client: Client) -> int:
        announced = await client.workers()
        matching = [info for info in announced if _matches(info, wanted)]
        if any(info.state == "ready" for info in matching):
            # Not for one worker, which could not help it, and whose supervisor asks often.
            found = [] if worker or here else (await examine(client.bus, announced)).troubles
            for each in found:
                (print_error if each.serious else warn)(printable(each.text))
            return EXIT_FAILED if any(each.serious for each in found) else 0
        states = ", ".join(_state(info) for info in matching)
        print_error(printable(f"not ready: {states}") if states else "no such worker is announced")
        return EXIT_FAILED

    return 0 if with_client(options, work) == 0 else EXIT_FAILED


def _matches(info: WorkerInfo, wanted: dict[str, str | None]) -> bool:
    return all(value is None or getattr(info, name) == value for name, value in wanted.items())


def _state(info: WorkerInfo) -> str:
    return f"{info.worker} {info.state}" + (f" ({_reason(info)})" if info.reason else "")


def _reason(info: WorkerInfo) -> str:
    """Short enough for a line."""
    return textwrap.shorten(info.reason or "", LONGEST_REASON, placeholder=" …")


def _kv_share(info: WorkerInfo) -> str:
    """The share of the KV cache that the requests in the engine will need."""
    tokens = info.capacity.kv_tokens if info.capacity else 0
    return f"{info.load.kv_forecast / tokens:.0%}" if tokens else "-"


def _row(info: WorkerInfo) -> tuple[object, ...]:
    return (
        info.model,
        info.role,
        info.worker,
        info.state if not info.reason else f"{info.state}: {_reason(info)}",
        f"{info.load.busy}/{info.load.slots}",
        info.load.queued,
        _kv_share(info),
        " ".join(info.kinds),
        info.engine,
        info.host,
    )
