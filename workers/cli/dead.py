"""`inferbus dead`: jobs whose last attempt failed."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any, Final

import click

from inferbus.schemas.errors import CallerError
from inferbus.workers.cli.options import Command, settings_options
from inferbus.workers.cli.running import EXIT_FAILED, print_error, with_client
from inferbus.workers.cli.tables import moment, print_table, printable, readable, size, span
from inferbus.workers.cli.text import print_json
from inferbus.workers.client import Client
from inferbus.workers.client.operator import Operator
from inferbus.workers.client.records import DeadLetter

_SEQUENCE: Final = click.IntRange(min=1)


@click.group()
def dead() -> None:
    """List, replay and purge dead letters: jobs whose last attempt failed.

    A dead letter is the job as it was submitted, and why it failed. It stays until it is replayed, purged or
    too old (--streams-dead-max-age).
    """


@dead.command("ls", cls=Command)
@click.option("--model", metavar="NAME", help="Only of this model.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@settings_options("bus")
def list_letters(model: str | None, as_json: bool, **options: Any) -> int:
    """List the dead letters, oldest first."""

    async def work(client: Client) -> int:
        letters = [letter async for letter in Operator(client.bus).dead_letters(model=model)]
        if as_json:
            print_json(letters)
        elif letters:
            columns = ("seq", "age", "model", "kind", "owner", "job", "attempts", "size", "code", "reason")
            print_table(columns, map(_row, letters))
        else:
            click.echo("no dead letters", err=True)
        return 0

    return with_client(options, work)


@dead.command(cls=Command)
@click.argument("seq", type=_SEQUENCE)
@click.option("--body", is_flag=True, help="The job's body as well, as it was submitted: request content.")
@settings_options("bus")
def show(seq: int, body: bool, **options: Any) -> int:
    """Show one dead letter: where it came from, and its headers."""

    async def work(client: Client) -> int:
        stored_letter = await Operator(client.bus).dead_letter(seq)
        if stored_letter is None:
            return _not_found(seq)
        letter, stored = stored_letter
        lines = {"Subject": stored.subject, "Died": moment(letter.died), "Size": f"{letter.size} bytes"}
        for name, value in (lines | dict(stored.headers)).items():
            click.echo(printable(f"{name}: {value}"))
        if body:
            click.echo()
            click.echo(readable(stored.data))
        return 0

    return with_client(options, work)


@dead.command(cls=Command)
@click.argument("seq", type=_SEQUENCE, nargs=-1)
@click.option("--all", "every", is_flag=True, help="All that are stored now.")
@click.option("--model", metavar="NAME", help="With --all: only of this model.")
@click.option("--no-deadline", is_flag=True, help="Without the deadlines that they had.")
@settings_options("bus")
def replay(seq: tuple[int, ...], every: bool, model: str | None, no_deadline: bool, **options: Any) -> int:
    """Queue dead letters' jobs again.

    Each becomes a new submission under its old id, with all its attempts, and its letter is removed once the
    server has the job. An interrupted replay can be repeated for ten minutes
    (--streams-duplicate-window); no job is queued twice then.
    """
    _check(seq, every, model)

    async def work(client: Client) -> int:
        operator, code = Operator(client.bus), 0
        async for sequence in _sequences(operator, seq, every, model):
            try:
                done = await operator.replay(sequence, deadline=not no_deadline)
            except CallerError as error:
                print_error(error)
                code = EXIT_FAILED
                continue
            if done is not None:
                again = " (was queued before)" if done.before else ""
                name = printable(f"{done.job.owner} {done.job.id}")
                click.echo(f"{sequence}: {name} is queued as submission {done.job.submission}{again}")
            elif not every:
                code = _not_found(sequence)
        return code

    return with_client(options, work)


@dead.command(cls=Command)
@click.argument("seq", type=_SEQUENCE, nargs=-1)
@click.option("--all", "every", is_flag=True, help="All that are stored now.")
@click.option("--model", metavar="NAME", help="With --all: only of this model.")
@click.option("--yes", is_flag=True, help="Needed with --all.")
@settings_options("bus")
def purge(seq: tuple[int, ...], every: bool, model: str | None, yes: bool, **options: Any) -> int:
    """Remove dead letters for good."""
    _check(seq, every, model)
    if every and not yes:
        raise click.UsageError("this removes all of them for good: add --yes")

    async def work(client: Client) -> int:
        operator, code = Operator(client.bus), 0
        if every:
            count = await operator.discard_all(model=model)
            click.echo(f"{count} dead letter{'' if count == 1 else 's'} removed")
        for sequence in seq:
            if await operator.discard(sequence):
                click.echo(f"{sequence}: removed")
            else:
                code = _not_found(sequence)
        return code

    return with_client(options, work)


async def _sequences(
    operator: Operator, sequences: tuple[int, ...], every: bool, model: str | None
) -> AsyncIterator[int]:
    for sequence in sequences:
        yield sequence
    if every:
        async for letter in operator.dead_letters(model=model):
            yield letter.letter


def _check(sequences: tuple[int, ...], every: bool, model: str | None) -> None:
    if bool(sequences) == every:
        raise click.UsageError("name dead letters by their sequence, or all of them by --all")
    if model is not None and not every:
        raise click.UsageError("--model goes with --all")


def _not_found(sequence: int) -> int:
    print_error(f"there is no dead letter {sequence}")
    return EXIT_FAILED


def _row(letter: DeadLetter) -> tuple[object, ...]:
    return (
        letter.letter,
        span(letter.age),
        letter.model,
        letter.kind,
        letter.owner,
        letter.job,
        letter.attempts,
        size(letter.size),
        letter.code,
        letter.reason,
    )
