"""`inferbus doctor`: examines a whole set-up, and says how to mend what is wrong."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, Final, get_args

import click

from inferbus.workers.cli.ask import owner_option
from inferbus.workers.cli.options import Command, settings_of, settings_options
from inferbus.workers.cli.running import EXIT_FAILED, run_coroutine
from inferbus.workers.cli.tables import printable
from inferbus.workers.cli.text import print_json
from inferbus.workers.doctor import Finding, examine
from inferbus.workers.doctor.permissions import User
from inferbus.workers.observe import logs

_COLOURS: Final = {"ok": "green", "warn": "yellow", "fail": "red", "skip": "dim"}


@click.command(cls=Command)
@click.option(
    "--user",
    type=click.Choice(get_args(User)),
    default="client",
    show_default=True,
    help="What the NATS user is to be; `worker` examines this machine as well.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@owner_option
@settings_options("bus", "streams")
def doctor(user: User, owner: str | None, as_json: bool, **flags: Any) -> int:
    """Examine a set-up, and say how to mend what is wrong.

    NATS and the login, JetStream, the permissions of this user, the clock, the streams, the workers; for a
    worker also versions, GPUs and a transfer by NIXL. Exits with 1 if something failed. It changes nothing,
    except that it makes and deletes an empty stream in memory, where this user may.
    """
    settings = settings_of(flags)
    logs.configure(level="CRITICAL", format="text")

    async def work() -> int:
        findings = await examine(settings, user=user, **({"owner": owner} if owner else {}))
        if as_json:
            print_json(findings)
        else:
            show(findings)
        return EXIT_FAILED if any(each.level == "fail" for each in findings) else 0

    return run_coroutine(work)


def show(findings: Sequence[Finding]) -> None:
    """Prints findings: a table on a terminal, else a line for each, and an indented one for what to do."""
    if not sys.stdout.isatty():
        for each in findings:
            click.echo(printable(f"{each.level:4}  {each.name}: {each.found}"))
            if each.mend:
                click.echo(printable(f"      {each.mend}"))
        return
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("", "what", "found", "to do"):
        table.add_column(column, overflow="fold")
    for each in findings:
        cells = (each.name, each.found, each.mend)
        table.add_row(
            Text(each.level, style=_COLOURS[each.level]), *(Text(printable(cell)) for cell in cells)
        )
    Console().print(table)
