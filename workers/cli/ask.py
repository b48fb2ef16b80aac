"""`inferbus chat`, `complete` and `tokens`: live requests, answered on the terminal as they are generated."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from typing import Any, Final, TypeVar

import click

from inferbus.schemas import codec
from inferbus.schemas.answers import ComputedAnswer, TokenChunk
from inferbus.schemas.errors import UndecodableBody
from inferbus.workers.cli.options import Command, settings_options
from inferbus.workers.cli.running import OWNER_ENV, explaining_absence, model_or_only, with_client
from inferbus.workers.cli.tables import printable
from inferbus.workers.cli.text import print_json, read_text
from inferbus.workers.client import AnswerStream, Client, LiveStream, Restarted, Stats, text

F = TypeVar("F", bound=Callable[..., Any])


def request_options(command: F) -> F:
    """Adds the options that the three commands share."""
    for option in reversed(_SHARED):
        command = option(command)
    return command


def _refuse_model(ctx: click.Context, _param: click.Parameter, value: str | None) -> None:
    if value is not None:
        raise click.UsageError(f"the model is an argument: inferbus {ctx.info_name} MODEL TEXT")


_SHARED: Final = (
    click.option("--model", hidden=True, expose_value=False, callback=_refuse_model),
    click.option("--max-tokens", type=int, help="Most tokens of the answer."),
    click.option("--temperature", type=float, help="0 is greedy."),
    click.option(
        "--param",
        "params",
        multiple=True,
        metavar="NAME=JSON",
        help="A further field of the body; a value that is not JSON is a text.",
    ),
    click.option("--timeout", type=float, help="Seconds of silence after which to give up."),
    click.option("--deadline", type=float, help="Seconds after which the request expires."),
    click.option("--json", "as_json", is_flag=True, help="Print the whole answer as JSON, at the end."),
    click.option("--quiet", "-q", is_flag=True, help="Print no line of statistics."),
    settings_options("bus"),
)


def owner_option(command: F) -> F:
    """Adds the option for the owner of jobs."""
    return click.option(
        "--owner", envvar=OWNER_ENV, metavar="NAME", help=f"Whose jobs; default: default.  [env {OWNER_ENV}]"
    )(command)


@click.command(cls=Command)
@click.argument("words", nargs=-1, required=True, metavar="[MODEL] TEXT")
@click.option("--system", metavar="TEXT", help="A system message.")
@request_options
def chat(words: tuple[str, ...], system: str | None, **options: Any) -> int:
    """Ask a model and show the answer as it comes.

    MODEL may be left out where only one is served. TEXT may be `-` for standard input or
    `@FILE`.
    """
    model, content = split_words(words)
    messages = [{"role": "system", "content": system}] if system else []
    messages.append({"role": "user", "content": content})
    return _ask(model, options, lambda client, name, more: client.chat(name, messages, **more))


@click.command(cls=Command)
@click.argument("words", nargs=-1, required=True, metavar="[MODEL] PROMPT")
@request_options
def complete(words: tuple[str, ...], **options: Any) -> int:
    """Let a model continue a text.

    MODEL may be left out where only one is served. PROMPT may be `-` for standard input or
    `@FILE`.
    """
    model, prompt = split_words(words)
    return _ask(model, options, lambda client, name, more: client.complete(name, prompt, **more))


@click.command(cls=Command)
@click.argument("words", nargs=-1, required=True, metavar="[MODEL] IDS")
@request_options
def tokens(words: tuple[str, ...], **options: Any) -> int:
    """Send token ids and print the token ids that follow.

    IDS are numbers with commas or spaces between; `-` reads standard input, `@FILE` a file.
    """
    model, given = split_words(words)
    token_ids = numbers(given)
    return _ask(model, options, lambda client, name, more: client.tokens(name, token_ids, **more))


def numbers(given: str) -> list[int]:
    """Token ids with commas or spaces between.

    Raises:
        click.UsageError: They are no numbers.
    """
    ids = re.findall(r"[^\s,\[\]]+", given)
    if not ids or not all(each.isdecimal() for each in ids):
        raise click.UsageError("IDS must be numbers with commas or spaces between")
    return [int(each) for each in ids]


def parse_params(params: tuple[str, ...]) -> dict[str, Any]:
    """`name=value` pairs; a value that is not JSON is a text."""
    fields: dict[str, Any] = {}
    for param in params:
        name, separator, value = param.partition("=")
        if not separator:
            raise click.UsageError(f"--param takes NAME=JSON, not {param!r}")
        try:
            fields[name] = codec.decode(value.encode(errors="surrogateescape"), object)
        except UndecodableBody:
            fields[name] = value
    return fields


async def show(answer: AnswerStream[Any], *, as_json: bool, quiet: bool) -> int:
    """Prints an answer as text or JSON, then its statistics on standard error."""
    if as_json:
        print_json(await answer.answer())
    else:
        await _show_text(answer)
        if isinstance(whole := await answer.answer(), ComputedAnswer):
            print_json(whole)
    for warning in answer.warnings:
        click.echo(printable(f"warning: {warning}"), err=True)
    if not quiet:
        click.echo(printable(Stats.of(answer).line()), err=True)
    return 0


async def _show_text(answer: AnswerStream[Any]) -> None:
    printed = False
    try:
        async for event in answer:
            if isinstance(event, Restarted):
                click.echo("\n[a worker was lost; from the beginning:]", err=True)
                continue
            piece = _piece(event)
            if piece:
                printed = True
                click.echo(piece, nl=False)
                sys.stdout.flush()
    finally:
        if printed:
            click.echo()


def _piece(event: Any) -> str:
    if isinstance(event, TokenChunk):
        return "".join(f"{token} " for token in event.token_ids)
    return text(event)


def split_words(words: tuple[str, ...]) -> tuple[str | None, str]:
    """The model, where it is named, and the text.

    Raises:
        click.UsageError: There are more words than two.
    """
    if len(words) > 2:
        raise click.UsageError("put the text in quotes")
    *model, given = words
    return (model[0] if model else None), read_text(given)


def _ask(
    model: str | None,
    options: dict[str, Any],
    send: Callable[[Client, str, dict[str, Any]], LiveStream[Any]],
) -> int:
    body = parse_params(options.pop("params"))
    for name in ("max_tokens", "temperature", "deadline", "timeout"):
        if (value := options.pop(name)) is not None:
            body[name] = value
    as_json, quiet = options.pop("as_json"), options.pop("quiet")

    async def work(client: Client) -> int:
        name = await model_or_only(client, model)
        async with explaining_absence(client, name), send(client, name, body) as answer:
            return await show(answer, as_json=as_json, quiet=quiet)

    return with_client(options, work)
