"""`inferbus streams`: what JetStream holds, and whether it is as the settings ask for."""

from __future__ import annotations

from typing import Any

import click

from inferbus.schemas import codec
from inferbus.workers.cli.options import Command, settings_of, settings_options
from inferbus.workers.cli.queues import state
from inferbus.workers.cli.running import EXIT_FAILED, complain, run
from inferbus.workers.cli.tables import print_table, size, span
from inferbus.workers.client import Client
from inferbus.workers.client.operator import Operator
from inferbus.workers.client.survey import StreamState


@click.command(cls=Command)
@click.option("--adopt", is_flag=True, help="Make what is missing, and raise what is weaker.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@settings_options("bus", "streams")
def streams(adopt: bool, as_json: bool, **flags: Any) -> int:
    """Show the streams and consumers, and whether they are as the settings ask for.

    Exits with 1 if one is missing or weaker. --adopt changes that; it lowers nothing.
    """
    settings = settings_of(flags)

    async def work(client: Client) -> int:
        operator = Operator(client.bus)
        if adopt:
            await operator.adopt(settings)
        found = await operator.streams(settings)
        if as_json:
            click.echo(codec.encode(found).decode())
        else:
            _print(found)
        if all(each.fine for each in found):
            return 0
        complain("not all is as these settings ask for; `inferbus streams --adopt` raises it")
        return EXIT_FAILED

    return run(settings, work)


def _print(found: list[StreamState]) -> None:
    columns = ("stream", "messages", "bytes", "limit", "age limit", "storage", "copies", "state")
    print_table(columns, map(_row, found))
    if unclaimed := sum(each.unclaimed for each in found):
        click.echo(
            f"\n{unclaimed} jobs that no consumer gives out: was a worker of their model ever started?"
        )
    consumers = [each for stream in found for each in stream.consumers]
    if not consumers:
        return
    click.echo()
    columns = ("consumer", "stream", "queued", "taken", "taken again", "pulls", "delivery", "state")
    rows = []
    for each in consumers:
        queue = each.queue
        numbers: tuple[object, ...] = (None,) * 5
        if queue is not None:
            numbers = (queue.pending, queue.ack_pending, queue.redelivered, queue.waiting, state(queue))
        whose = "ok" if queue is not None else "not inferbus's"
        rows.append((each.consumer, each.stream, *numbers, "; ".join(each.differences) or whose))
    print_table(columns, rows)


def _row(each: StreamState) -> tuple[object, ...]:
    if not each.there:
        return (each.stream, *(None,) * 6, "missing")
    return (
        each.stream,
        each.messages,
        size(each.bytes),
        size(each.max_bytes) if each.max_bytes > 0 else "none",
        span(each.max_age) if each.max_age else "none",
        each.storage,
        each.replicas,
        "; ".join(each.differences) or "ok",
    )
