"""`inferbus batch`: files of requests."""

from __future__ import annotations

import asyncio
import contextlib
import datetime as dt
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import click

from inferbus.workers.batch.bundling import Pace
from inferbus.workers.batch.copies import Copy
from inferbus.workers.batch.errors import BatchHeld, OutputFailed
from inferbus.workers.batch.output import whole_lines
from inferbus.workers.batch.progress import Speed, describe
from inferbus.workers.batch.runs import Begun, Options, begin, proceed, run
from inferbus.workers.batch.state import ENDED, Batches, Record
from inferbus.workers.cli.ask import owner_option
from inferbus.workers.cli.mapping import mapping_options, template_of
from inferbus.workers.cli.options import CONFIG_ENV, Command, settings_options
from inferbus.workers.cli.queues import duration
from inferbus.workers.cli.running import (
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    OWNER_ENV,
    CommandFailed,
    warn,
    with_client,
)
from inferbus.workers.cli.tables import moment, print_table
from inferbus.workers.cli.text import print_json
from inferbus.workers.cli.waiting import telling_of_workers
from inferbus.workers.client import Client
from inferbus.workers.config import options as settings

EVERY: Final = 10.0
"""Seconds between two lines of progress where there is no terminal."""

POLL: Final = 1.0

Report = Callable[[Record, Pace, int], None]

_json: Final = click.option("--json", "as_json", is_flag=True, help="Print batch objects as JSON lines.")


@click.group()
def batch() -> None:
    """Run files of requests, whatever dies meanwhile.

    FILE is an OpenAI batch file: JSON lines with custom_id, method, url and body; also .gz and .zst,
    and - for standard input. With --map it is any table: CSV, TSV, JSON lines, Parquet, Arrow, or the folder
    of a dataset. Run the same command again after an interruption, and it goes on.
    """


def _run_options(command: Any) -> Any:
    for option in reversed(
        [
            click.option(
                "--output", type=click.Path(dir_okay=False, path_type=Path), help="The output file."
            ),
            click.option("--errors", type=click.Path(dir_okay=False, path_type=Path), help="The error file."),
            click.option("--model", metavar="NAME", help="For all lines, whatever they name."),
            click.option(
                "--window", callback=duration, metavar="TIME", help="When it expires: 24h; default: never."
            ),
            click.option(
                "--line-deadline",
                callback=duration,
                metavar="TIME",
                help="How long a line may take from when it is submitted; default: no limit.",
            ),
            click.option("--skip-invalid", is_flag=True, help="Lines that cannot be run become error lines."),
            click.option(
                "--no-reorder",
                is_flag=True,
                help="Send lines in the input's order, not those near each other whose prompts begin alike.",
            ),
            click.option("--ordered", is_flag=True, help="Put the finished output into the input's order."),
            click.option(
                "--shared",
                is_flag=True,
                help="Keep input and output on the server too, until `batch rm`: another machine can go on.",
            ),
        ]
    ):
        command = option(command)
    return mapping_options(command)


@batch.command("run", cls=Command)
@click.argument("files", nargs=-1, required=True, metavar="FILE...")
@_run_options
@_json
@owner_option
@settings_options("bus")
def run_files(files: tuple[str, ...], as_json: bool, **options: Any) -> int:
    """Submit a file's lines, wait, and write the answers.

    The output is FILE.output.jsonl and FILE.errors.jsonl, with .partial while it grows.
    """
    given = _options(options, files)

    async def work(client: Client) -> int:
        code = 0
        for name in files:
            source = _spooled(given.output) if name == "-" else Path(name)
            begun = await begin(client, source, given)
            code = max(code, await _run(client, begun, as_json=as_json))
        return code

    return with_client(options, work)


@batch.command("submit", cls=Command)
@click.argument("file", type=click.Path(exists=True, path_type=Path))
@_run_options
@owner_option
@settings_options("bus")
def submit_file(file: Path, **options: Any) -> int:
    """Run a file in a process of its own, and return once it is validated.

    Prints the batch's id. Whatever ends that process, `batch resume ID` goes on.
    """
    given = _options(options, (str(file),))
    flags, config = dict(options), options["config"]

    async def work(client: Client) -> int:
        begun = await begin(client, file, given)
        record = begun.kept.record
        if not begun.complete:
            _detach(record, flags, config)
        click.echo(record.id)
        return 0

    return with_client(options, work)


@batch.command("resume", cls=Command)
@click.argument("batch_id", metavar="ID")
@click.option("--input", "source", type=click.Path(path_type=Path), help="Where the input is now.")
@click.option("--output", type=click.Path(dir_okay=False, path_type=Path), help="Where the output is now.")
@_json
@owner_option
@settings_options("bus")
def resume_batch(
    batch_id: str, source: Path | None, output: Path | None, as_json: bool, **options: Any
) -> int:
    """Go on with a batch: one that is --shared on any machine, others where their files are."""

    async def work(client: Client) -> int:
        begun = await proceed(client, batch_id, source=source, output=output)
        return await _run(client, begun, as_json=as_json)

    return with_client(options, work)


@batch.command("retry", cls=Command)
@click.argument("batch_id", metavar="ID")
@_json
@owner_option
@settings_options("bus")
def retry_batch(batch_id: str, as_json: bool, **options: Any) -> int:
    """Run only the lines again that failed, were cancelled or expired."""

    async def work(client: Client) -> int:
        return await _run(client, await proceed(client, batch_id, retry=True), as_json=as_json)

    return with_client(options, work)


@batch.command("ls", cls=Command)
@_json
@owner_option
@settings_options("bus")
def list_batches(as_json: bool, **options: Any) -> int:
    """List batches, the newest first."""

    async def work(client: Client) -> int:
        found = [kept.record for kept in await Batches(client.bus, client.owner).all()]
        if as_json:
            for record in found:
                print_json(record.openai())
            return 0
        rows = [
            (
                record.id,
                record.status,
                f"{record.counts.ended}/{record.source.lines}",
                record.counts.errored or None,
                record.model,
                record.output,
            )
            for record in found
        ]
        print_table(("batch", "status", "done", "failed", "model", "output"), rows)
        return 0

    return with_client(options, work)


@batch.command("status", cls=Command)
@click.argument("batch_id", metavar="ID")
@_json
@owner_option
@settings_options("bus")
def show_status(batch_id: str, as_json: bool, **options: Any) -> int:
    """Show how a batch stands, from anywhere."""

    async def work(client: Client) -> int:
        record = (await Batches(client.bus, client.owner).get(batch_id)).record
        _show(record, as_json=as_json)
        return 0

    return with_client(options, work)


@batch.command("wait", cls=Command)
@click.argument("batch_id", metavar="ID")
@_json
@owner_option
@settings_options("bus")
def wait_for(batch_id: str, as_json: bool, **options: Any) -> int:
    """Wait until a batch has ended, whoever runs it."""

    async def work(client: Client) -> int:
        batches, told = Batches(client.bus, client.owner), False
        record = (await batches.get(batch_id)).record
        model = None if record.status in ENDED else record.model
        async with telling_of_workers(client, model, waiting="the batch"):
            while record.status not in ENDED:
                if not told and (record.holder is None or record.holder.gone):
                    told = True
                    warn(f"no process runs this batch; `inferbus batch resume {batch_id}` does")
                await asyncio.sleep(POLL)
                record = (await batches.get(batch_id)).record
        _show(record, as_json=as_json)
        return _code(record)

    return with_client(options, work)


@batch.command("cancel", cls=Command)
@click.argument("batch_id", metavar="ID")
@owner_option
@settings_options("bus")
def cancel_batch(batch_id: str, **options: Any) -> int:
    """Stop a batch; lines that are not done become error lines.

    The process that runs it does so within seconds. Where there is none, `batch resume ID` does.
    """

    async def work(client: Client) -> int:
        batches = Batches(client.bus, client.owner)
        record = (await batches.get(batch_id)).record
        if record.status in ENDED:
            raise CommandFailed(f"the batch has ended: {record.status}")
        await batches.ask_cancel(batch_id)
        if record.holder is None or record.holder.gone:
            warn(f"no process runs this batch; `inferbus batch resume {batch_id}` writes its error lines")
        return 0

    return with_client(options, work)


@batch.command("fetch", cls=Command)
@click.argument("batch_id", metavar="ID")
@click.option("--failed", is_flag=True, help="The lines of the error file.")
@owner_option
@settings_options("bus")
def fetch_lines(batch_id: str, failed: bool, **options: Any) -> int:
    """Print the lines that are done, also while the batch runs.

    They are read from its files on this machine; of a batch that is --shared, also from the server.
    """

    async def work(client: Client) -> int:
        record = (await Batches(client.bus, client.owner).get(batch_id)).record
        path = record.errors if failed else record.output
        if record.shared and not record.here:
            name = record.copy_names[path]
            async for part in Copy(client.bus, client.owner, record.id, name).read():
                click.echo(part, nl=False)
            return 0
        if not record.here:
            raise CommandFailed(f"its files are on {record.host}, and it is not --shared")
        _print_lines(Path(path))
        return 0

    return with_client(options, work)


@batch.command("rm", cls=Command)
@click.argument("batch_id", metavar="ID")
@owner_option
@settings_options("bus")
def remove(batch_id: str, **options: Any) -> int:
    """Forget a batch that nobody runs; its files stay."""

    async def work(client: Client) -> int:
        batches = Batches(client.bus, client.owner)
        record = (await batches.get(batch_id)).record
        if record.status not in ENDED and record.holder is not None and not record.holder.gone:
            raise BatchHeld("a process runs this batch; cancel it first")
        await batches.remove(record)
        return 0

    return with_client(options, work)


async def _run(client: Client, begun: Begun, *, as_json: bool) -> int:
    record = begun.kept.record
    if not as_json:
        click.echo(f"{record.id}: {record.source.lines} lines to {record.output}", err=True)
    with _progress(as_json=as_json) as report:
        try:
            async with telling_of_workers(client, record.model, waiting="the batch"):
                record = await run(client, begun, report=report)
        except asyncio.CancelledError:
            click.echo("inferbus: stopped; the same command goes on", err=True)
            raise
        except OutputFailed as error:
            raise OutputFailed(
                f"{error.message}; what was written stands, the same command goes on"
            ) from None
    _show(record, as_json=as_json)
    return _code(record)


def _code(record: Record) -> int:
    if record.status == "cancelled":
        return EXIT_INTERRUPTED
    return 0 if record.status == "completed" and not record.counts.errored else EXIT_FAILED


@contextlib.contextmanager
def _progress(*, as_json: bool) -> Iterator[Report]:
    """Shows how a batch stands: a line that changes, lines now and then, or JSON."""
    speed = Speed()
    if as_json:
        yield _every(POLL, lambda record, pace, submitted: print_json(record.openai()))
    elif sys.stderr.isatty():
        from rich.console import Console
        from rich.live import Live

        with Live(console=Console(stderr=True), transient=True) as live:
            yield _every(
                0.25,
                lambda record, pace, submitted: live.update(
                    describe(record, pace, submitted, speed.see(record))
                ),
            )
    else:
        yield _every(
            EVERY,
            lambda record, pace, submitted: click.echo(
                describe(record, pace, submitted, speed.see(record)), err=True
            ),
        )


def _every(seconds: float, report: Report) -> Report:
    last = -seconds

    def reporting(record: Record, pace: Pace, submitted: int) -> None:
        nonlocal last
        if time.monotonic() - last >= seconds:
            last = time.monotonic()
            report(record, pace, submitted)

    return reporting


def _show(record: Record, *, as_json: bool) -> None:
    if as_json:
        print_json(record.openai())
        return
    click.echo(f"{record.id} {record.status}: {describe(record, None, None, (record.rate, 0.0))}")
    counts, usage = record.counts, record.usage
    click.echo(f"  succeeded {counts.succeeded} in {record.output}")
    if counts.ended > counts.succeeded:
        click.echo(f"  others    {counts.ended - counts.succeeded} in {record.errors}")
    click.echo(
        f"  tokens    {usage.input_tokens} in ({usage.cached_tokens} cached), {usage.output_tokens} out"
    )
    for name, stamp in sorted(record.stamps.items(), key=lambda each: each[1]):
        click.echo(f"  {name.removesuffix('_at'):<11} {moment(dt.datetime.fromtimestamp(stamp, dt.UTC))}")


def _options(options: dict[str, Any], files: tuple[str, ...]) -> Options:
    output, errors = options.pop("output"), options.pop("errors")
    if len(files) > 1 and (output or errors):
        raise click.UsageError("--output and --errors are for one file")
    if "-" in files and output is None:
        raise click.UsageError("standard input needs --output")
    return Options(
        output=output,
        errors=errors,
        model=options.pop("model"),
        window=options.pop("window"),
        deadline=options.pop("line_deadline"),
        skip_invalid=options.pop("skip_invalid"),
        ordered=options.pop("ordered"),
        reorder=not options.pop("no_reorder"),
        template=template_of(options),
        shared=options.pop("shared"),
    )


def _spooled(output: Path | None) -> Path:
    """Standard input as a file beside the output, which another run reads again."""
    assert output is not None
    path = output.with_name(f"{output.name}.input.jsonl")
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.tmp")
    with temporary.open("wb") as file:
        shutil.copyfileobj(sys.stdin.buffer, file)
    temporary.replace(path)
    return path


def _print_lines(path: Path) -> None:
    for line in whole_lines(path):
        click.echo(line, nl=False)


def _detach(record: Record, flags: dict[str, Any], config: Path | None) -> None:
    """Starts a process that runs a batch, and outlives this one; its settings are in its environment."""
    command = [sys.executable, "-m", "inferbus.workers.cli", "batch", "resume", record.id]
    env = os.environ | {OWNER_ENV: record.owner}
    for option in settings("bus"):
        if (value := flags.get(option.name)) not in (None, ()):
            env[option.env] = ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
    if config is not None:
        env[CONFIG_ENV] = str(config)
    with Path(f"{record.output}.log").open("ab") as log:
        subprocess.Popen(  # noqa: S603 - this program itself
            command, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
        )
