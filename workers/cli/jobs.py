"""`inferbus submit`, `result`, `stream` and `cancel`: durable jobs."""

from __future__ import annotations

from typing import Any, BinaryIO

import click

from inferbus.schemas import codec
from inferbus.schemas.errors import InferbusError
from inferbus.schemas.subjects import CLASSES, KINDS, JobClass, Kind
from inferbus.workers.cli.ask import owner_option, show
from inferbus.workers.cli.options import Command, settings_options
from inferbus.workers.cli.running import with_client
from inferbus.workers.client import Client, Job, Result
from inferbus.workers.client.deltas import to_chunks
from inferbus.workers.client.stream import text


@click.command(cls=Command)
@click.argument("kind", type=click.Choice(KINDS))
@click.argument("model")
@click.argument("body", type=click.File("rb"), default="-", metavar="[FILE]")
@click.option("--job-id", metavar="ID", help="The job's id; default: random. The same id twice is one job.")
@click.option("--again", is_flag=True, help="Submit an id that was submitted before as a new submission.")
@click.option("--class", "job_class", type=click.Choice(CLASSES), default="batch", show_default=True)
@click.option("--deadline", type=float, metavar="SECONDS", help="When the job expires, also while queued.")
@click.option("--no-stream", is_flag=True, help="Store only the result, no chunks.")
@click.option("--wait", is_flag=True, help="Show the answer as it comes, and wait for its end.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@owner_option
@settings_options("bus")
def submit(
    kind: Kind,
    model: str,
    body: BinaryIO,
    job_id: str | None,
    again: bool,
    job_class: JobClass,
    deadline: float | None,
    no_stream: bool,
    wait: bool,
    as_json: bool,
    **options: Any,
) -> int:
    """Submit a durable job.

    Prints the job's id, and the submission's number in the stream of jobs.

    The body is JSON as the kind defines it, from FILE or standard input.
    """
    try:
        fields = codec.decode_object(body.read())
    except InferbusError as error:
        raise click.UsageError(error.message) from None

    async def work(client: Client) -> int:
        job = await client.submit(
            kind,
            model,
            fields,
            job_id=job_id,
            job_class=job_class,
            deadline=deadline,
            stream=not no_stream,
            again=again,
        )
        if wait:
            click.echo(_line(job), err=True)
            async with client.stream(job) as answer:
                return await show(answer, as_json=as_json, quiet=False)
        click.echo(codec.encode(job).decode() if as_json else _line(job))
        return 0

    return with_client(options, work)


@click.command(cls=Command)
@click.argument("job")
@click.option(
    "--timeout", type=float, metavar="SECONDS", help="How long to wait; default: as long as it takes."
)
@click.option("--json", "as_json", is_flag=True, help="Print the whole answer as JSON.")
@owner_option
@settings_options("bus")
def result(job: str, timeout: float | None, as_json: bool, **options: Any) -> int:
    """Wait for a job's result and print it."""

    async def work(client: Client) -> int:
        stored = await client.result(job, timeout)
        click.echo(codec.encode(stored.answer).decode() if as_json else _result_text(stored))
        return 0

    return with_client(options, work)


@click.command(cls=Command)
@click.argument("job")
@click.option("--timeout", type=float, metavar="SECONDS", help="Silence after which to stop reading.")
@click.option("--json", "as_json", is_flag=True, help="Print the whole answer as JSON, at the end.")
@click.option("--quiet", "-q", is_flag=True, help="No line of statistics.")
@owner_option
@settings_options("bus")
def stream(job: str, timeout: float | None, as_json: bool, quiet: bool, **options: Any) -> int:
    """Show a job's answer as it comes.

    From its beginning, whenever it is read. Leaving does not stop the job.
    """

    async def work(client: Client) -> int:
        async with client.stream(job, timeout=timeout) as answer:
            return await show(answer, as_json=as_json, quiet=quiet)

    return with_client(options, work)


@click.command(cls=Command)
@click.argument("job")
@click.option("--submission", type=int, metavar="N", help="Only this one; default: all up to now.")
@owner_option
@settings_options("bus")
def cancel(job: str, submission: int | None, **options: Any) -> int:
    """Stop a job wherever it is.

    Also while it is queued.
    """

    async def work(client: Client) -> int:
        named = client.job(job)
        await client.cancel(Job(id=named.id, owner=named.owner, submission=submission))
        return 0

    return with_client(options, work)


def _line(job: Job) -> str:
    return f"{job.id} {job.submission}{' (submitted before)' if job.duplicate else ''}"


def _result_text(stored: Result) -> str:
    """A result's text, or its token ids; one choice after the other."""
    assert stored.answer is not None
    choices: dict[int, str] = {}
    for chunk in to_chunks(stored.answer):
        if isinstance(chunk, dict):
            for choice in chunk["choices"]:
                index = choice.get("index", 0)
                choices[index] = choices.get(index, "") + text(chunk, index=index)
        else:
            choices[chunk.index] = " ".join(map(str, chunk.token_ids))
    return "\n".join(choices.values())
