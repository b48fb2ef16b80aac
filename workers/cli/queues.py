"""`inferbus jobs`, `pause` and `resume`: the queues of durable jobs, for operators."""

from __future__ import annotations

import datetime as dt
import re
from collections.abc import Iterable
from typing import Any, Final

import click

from inferbus.schemas.errors import BusUnavailable
from inferbus.schemas.subjects import CLASSES, JobClass
from inferbus.workers.bus.connection.bus import Bus
from inferbus.workers.cli.options import Command, settings_options
from inferbus.workers.cli.running import EXIT_FAILED, print_error, with_client
from inferbus.workers.cli.tables import moment, print_table, printable, size, span
from inferbus.workers.cli.text import print_json
from inferbus.workers.client import Client
from inferbus.workers.client.operator import Operator
from inferbus.workers.client.records import NO_END, JobReport, Queue, QueuedJob

LIMIT: Final = 50
_DURATION: Final = re.compile(r"([0-9]{1,9}(?:\.[0-9]{1,9})?)([smhd]?)")
_UNITS: Final = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def duration(_ctx: click.Context, _param: click.Parameter, value: str | None) -> float | None:
    """A duration in seconds."""
    if value is None:
        return None
    match = _DURATION.fullmatch(value.strip())
    seconds = float(match[1]) * _UNITS[match[2]] if match else 0.0
    if not 0 < seconds < NO_END.total_seconds():
        raise click.BadParameter("a duration is a number and one of s, m, h, d: 90s, 10m, 2h")
    return seconds


_class: Final = click.option("--class", "job_class", type=click.Choice(CLASSES), help="Only of this class.")


@click.group()
def jobs() -> None:
    """Inspect the queues of durable jobs.

    A job is `queued` until a worker takes it, and `taken` until it has ended: it runs, or waits for its next
    attempt.
    """


@jobs.command("ls", cls=Command)
@click.option("--model", metavar="NAME", help="Only of this model.")
@_class
@click.option("--owner", metavar="NAME", help="Only of this owner.")
@click.option(
    "--limit", type=click.IntRange(min=0), default=LIMIT, show_default=True, help="Jobs to list; 0: all."
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@settings_options("bus")
def list_jobs(
    model: str | None,
    job_class: JobClass | None,
    owner: str | None,
    limit: int,
    as_json: bool,
    **options: Any,
) -> int:
    """List the queues, and the jobs that have not ended, oldest first."""

    async def work(client: Client) -> int:
        operator = Operator(client.bus)
        queues = await operator.queues(model=model, job_class=job_class)
        listed, more = await operator.jobs(model=model, job_class=job_class, owner=owner, most=limit or None)
        if as_json:
            print_json({"queues": queues, "jobs": listed, "more": more})
            return 0
        if queues:
            _print_queues(queues)
        if queues and listed:
            click.echo()
        if listed:
            _print_jobs(listed)
        if more:
            click.echo(f"{more} more; --limit lists more", err=True)
        elif not listed:
            click.echo("no jobs", err=True)
        return 0

    return with_client(options, work)


@jobs.command(cls=Command)
@click.argument("words", nargs=-1, required=True, metavar="[OWNER] JOB")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@settings_options("bus")
def show(words: tuple[str, ...], as_json: bool, **options: Any) -> int:
    """Show one job: where it is, its attempts, its result.

    OWNER may be left out where only one has a job of this id.
    """
    if len(words) > 2:
        raise click.UsageError("name one job: [OWNER] JOB")
    *given, job = words

    async def work(client: Client) -> int:
        operator = Operator(client.bus)
        owners = given or await operator.owners(job)
        if len(owners) > 1:
            raise click.UsageError(f"several owners have a job of this id: {', '.join(owners)}")
        if not owners:
            print_error(printable(f"there is no job {job} of any owner"))
            return EXIT_FAILED
        [owner] = owners
        report = await operator.job(owner, job)
        if as_json:
            print_json(report)
        elif report.known:
            for line in _report_lines(report):
                click.echo(printable(line))
        else:
            print_error(printable(f"there is no job {job} of {owner}"))
        return 0 if report.known else EXIT_FAILED

    return with_client(options, work)


@jobs.command(cls=Command)
@click.argument("owner")
@click.argument("job", nargs=-1, required=True)
@settings_options("bus")
def cancel(owner: str, job: tuple[str, ...], **options: Any) -> int:
    """Stop jobs wherever they are.

    Also while they are queued. Later submissions of the same ids are not affected.
    A queued job of a model that no worker has ever served is removed.
    """

    async def work(client: Client) -> int:
        for each in job:
            for removed in await Operator(client.bus).cancel(owner, each):
                click.echo(
                    printable(
                        f"{each}: removed submission {removed.submission}, as no worker has ever served its "
                        f"model {removed.model}"
                    )
                )
        return 0

    return with_client(options, work)


@click.command(cls=Command)
@click.argument("model")
@_class
@click.option(
    "--for", "length", callback=duration, metavar="TIME", help="90s, 10m, 2h; default: until resumed."
)
@settings_options("bus")
def pause(model: str, job_class: JobClass | None, length: float | None, **options: Any) -> int:
    """Stop delivering durable jobs of a model.

    Jobs are still accepted, running ones go on, and live requests are served.
    """

    async def work(client: Client) -> int:
        _print_states(await Operator(client.bus).pause(model, job_class=job_class, seconds=length))
        return 0

    return with_client(options, work)


@click.command(cls=Command)
@click.argument("model")
@_class
@settings_options("bus")
def resume(model: str, job_class: JobClass | None, **options: Any) -> int:
    """Deliver the durable jobs of a model again."""

    async def work(client: Client) -> int:
        _print_states(await Operator(client.bus).resume(model, job_class=job_class))
        return 0

    return with_client(options, work)


async def paused_lines(bus: Bus) -> list[str]:
    """A line for every paused queue; none where the user may not read the queues."""
    try:
        queues = await Operator(bus).queues()
    except BusUnavailable:
        return []
    return [f"{each.model} {each.job_class}: {state(each)}" for each in queues if each.paused_until]


def state(queue: Queue) -> str:
    """Whether a queue is paused, and until when."""
    until = queue.paused_until
    if until is None:
        return "open"
    if until - dt.datetime.now(dt.UTC) > NO_END / 2:
        return "paused until it is resumed"
    return f"paused until {moment(until)}"


def _print_states(queues: list[Queue]) -> None:
    for queue in queues:
        click.echo(printable(f"{queue.model} {queue.job_class}: {state(queue)}"))


def _print_queues(queues: list[Queue]) -> None:
    columns = ("model", "class", "queued", "taken", "taken again", "pulls", "state")
    rows = (
        (q.model, q.job_class, q.pending, q.ack_pending, q.redelivered, q.waiting, state(q)) for q in queues
    )
    print_table(columns, rows)


def _print_jobs(jobs: list[QueuedJob]) -> None:
    columns = ("submission", "job", "owner", "model", "class", "kind", "state", "age", "size")
    rows = (
        (
            job.submission,
            job.job,
            job.owner,
            job.model,
            job.job_class,
            job.kind,
            "taken" if job.taken else "queued",
            span(job.age),
            size(job.size),
        )
        for job in jobs
    )
    print_table(columns, rows)


def _report_lines(report: JobReport) -> Iterable[str]:
    for job in report.queued:
        where = "taken, and not ended" if job.taken else "queued"
        yield (
            f"{where}: submission {job.submission}, {job.model} {job.job_class} {job.kind}, "
            f"submitted {moment(job.submitted)}"
        )
    if report.attempts:
        yield f"attempts: {report.attempts}"
    if (result := report.result) is not None:
        code = f" ({result.code})" if result.code else ""
        yield (
            f"result: {result.status or 'unreadable'}{code}, {moment(result.stored)}, "
            f"submission {result.submission}, attempt {result.attempt}, worker {result.worker}"
        )
    if (mark := report.cancel) is not None:
        aim = "every submission before that" if mark.submission is None else f"submission {mark.submission}"
        yield f"cancelled: {moment(mark.requested)}, {aim}"
    for letter in report.letters:
        yield f"dead letter {letter.letter}: submission {letter.submission}, {letter.code}: {letter.reason}"
