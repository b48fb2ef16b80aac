"""`inferbus submit`, `result`, `stream` and `cancel`: durable jobs."""

from __future__ import annotations

from typing import Any, Final

import click

from inferbus.schemas import codec
from inferbus.schemas.answers import ComputedAnswer
from inferbus.schemas.subjects import CLASSES, KINDS, JobClass, Kind
from inferbus.workers.cli.ask import owner_option, show
from inferbus.workers.cli.options import Command, settings_options
from inferbus.workers.cli.running import warn, with_client
from inferbus.workers.cli.text import print_json, read_body
from inferbus.workers.cli.waiting import telling_of_workers
from inferbus.workers.client import Client, Job, Result
from inferbus.workers.client.deltas import to_chunks
from inferbus.workers.client.models import never_served, unserved
from inferbus.workers.client.stream import text

_submission: Final = click.option(
    "--submission", type=int, metavar="N", help="This submission; default: the newest."
)


@click.command(cls=Command)
@click.argument("kind", type=click.Choice(KINDS))
@click.argument("model")
@click.argument("body", default="-", metavar="[FILE]")
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
    body: str,
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
    fields = read_body(body)

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
        if await never_served(client.bus, model):
            # `inferbus init` was told of it, or the stream takes the jobs of every model.
            served = await client.models()
            if model not in served:
                warn(
                    f"no worker has ever served this model: {unserved(model, served)}; the job waits for one"
                )
        if wait:
            click.echo(_line(job), err=True)
            async with telling_of_workers(client, model), client.stream(job) as answer:
                return await show(answer, as_json=as_json, quiet=False)
        if as_json:
            print_json(job)
        else:
            click.echo(_line(job))
        return 0

    return with_client(options, work)


@click.command(cls=Command)
@click.argument("job")
@_submission
@click.option(
    "--timeout", type=float, metavar="SECONDS", help="How long to wait; default: as long as it takes."
)
@click.option("--json", "as_json", is_flag=True, help="Print the whole answer as JSON.")
@owner_option
@settings_options("bus")
def result(job: str, submission: int | None, timeout: float | None, as_json: bool, **options: Any) -> int:
    """Wait for a job's result and print it.

    JOB means its newest submission.
    """

    async def work(client: Client) -> int:
        found = await client.find(job, submission=submission)
        async with telling_of_workers(client, found.model):
            stored = await client.result(found, timeout)
        if as_json:
            print_json(stored.answer)
        else:
            click.echo(_result_text(stored))
        return 0

    return with_client(options, work)


@click.command(cls=Command)
@click.argument("job")
@_submission
@click.option("--timeout", type=float, metavar="SECONDS", help="Silence after which to stop reading.")
@click.option("--json", "as_json", is_flag=True, help="Print the whole answer as JSON, at the end.")
@click.option("--quiet", "-q", is_flag=True, help="No line of statistics.")
@owner_option
@settings_options("bus")
def stream(
    job: str, submission: int | None, timeout: float | None, as_json: bool, quiet: bool, **options: Any
) -> int:
    """Show a job's answer as it comes.

    JOB means its newest submission. From its beginning, whenever it is read. Leaving does not stop the job.
    """

    async def work(client: Client) -> int:
        found = await client.find(job, submission=submission)
        async with (
            telling_of_workers(client, found.model),
            client.stream(found, timeout=timeout) as answer,
        ):
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
    if isinstance(stored.answer, ComputedAnswer):
        return codec.encode(stored.answer).decode()
    choices: dict[int, str] = {}
    for chunk in to_chunks(stored.answer):
        if isinstance(chunk, dict):
            for choice in chunk["choices"]:
                index = choice.get("index", 0)
                choices[index] = choices.get(index, "") + text(chunk, index=index)
        else:
            choices[chunk.index] = " ".join(map(str, chunk.token_ids))
    return "\n".join(choices.values())
