"""`inferbus streams`: the NATS streams, compared with the settings."""

from __future__ import annotations

from typing import Any

import click

from inferbus.workers.cli.options import Command, settings_of, settings_options
from inferbus.workers.cli.queues import state as queue_state
from inferbus.workers.cli.running import EXIT_FAILED, print_error, run
from inferbus.workers.cli.tables import print_table, size, span
from inferbus.workers.cli.text import print_json
from inferbus.workers.client import Client
from inferbus.workers.client.operator import Operator
from inferbus.workers.client.survey import StreamState


@click.command(cls=Command)
@click.option("--adopt", is_flag=True, help="Create what is missing, and raise what is weaker.")
@click.option("--lower-replicas", is_flag=True, help="With --adopt: also lower the number of copies.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@settings_options("bus", "streams")
def streams(adopt: bool, lower_replicas: bool, as_json: bool, **flags: Any) -> int:
    """Show the NATS streams and consumers, compared with the settings.

    Exits with 1 if one is missing or weaker. --adopt changes that, and says on standard error what it did. It
    lowers nothing, except for the number of copies with --lower-replicas.
    """
    if lower_replicas and not adopt:
        raise click.UsageError("--lower-replicas goes with --adopt")
    settings = settings_of(flags)

    async def work(client: Client) -> int:
        operator = Operator(client.bus)
        if adopt:
            await operator.adopt(settings, lower_replicas=lower_replicas, report=_report)
        states = await operator.streams(settings)
        if as_json:
            print_json(states)
        else:
            _print(states)
        if all(each.fine for each in states):
            return 0
        print_error("some streams are weaker than these settings; `inferbus streams --adopt` raises them")
        return EXIT_FAILED

    return run(settings, work)


@click.command(cls=Command)
@click.argument("model")
@settings_options("bus", "streams")
def init(model: str, **flags: Any) -> int:
    """Have jobs of MODEL accepted before a worker has ever served it.

    Creates the streams that are missing, and the model's consumers.
    """
    settings = settings_of(flags)

    async def work(client: Client) -> int:
        await Operator(client.bus).init(model, settings)
        click.echo(f"jobs of {model} are accepted")
        return 0

    return run(settings, work)


def _report(change: str) -> None:
    click.echo(change, err=True)


def _print(states: list[StreamState]) -> None:
    columns = ("stream", "messages", "bytes", "limit", "age limit", "storage", "copies", "state")
    print_table(columns, map(_row, states))
    if unclaimed := sum(each.unclaimed for each in states):
        click.echo(f"\n{unclaimed} jobs that no consumer delivers: was a worker of their model ever started?")
    consumers = [each for state in states for each in state.consumers]
    if not consumers:
        return
    click.echo()
    columns = ("consumer", "stream", "queued", "taken", "taken again", "pulls", "delivery", "state")
    rows = []
    for each in consumers:
        queue = each.queue
        numbers: tuple[object, ...] = (None,) * 5
        if queue is not None:
            numbers = (queue.pending, queue.ack_pending, queue.redelivered, queue.waiting, queue_state(queue))
        whose = "ok" if queue is not None else "not of inferbus"
        rows.append((each.consumer, each.stream, *numbers, "; ".join(each.differences) or whose))
    print_table(columns, rows)


def _row(each: StreamState) -> tuple[object, ...]:
    if not each.exists:
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
