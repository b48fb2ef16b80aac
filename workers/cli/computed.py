"""`inferbus embeddings`, `tokenize` and `detokenize`: live requests whose answer comes in one piece."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import click

from inferbus.schemas.answers import DetokenizeAnswer, TokenizeAnswer
from inferbus.workers.cli.ask import numbers, parse_params, split_words
from inferbus.workers.cli.options import Command, settings_options
from inferbus.workers.cli.running import explaining_absence, model_or_only, with_client
from inferbus.workers.cli.tables import printable
from inferbus.workers.cli.text import print_json
from inferbus.workers.client import Client

_param = click.option(
    "--param",
    "params",
    multiple=True,
    metavar="NAME=JSON",
    help="A further field of the body; a value that is not JSON is a text.",
)
_timeout = click.option("--timeout", type=float, help="Seconds of silence after which to give up.")
_json = click.option("--json", "as_json", is_flag=True, help="Print the whole answer as JSON.")


@click.command(cls=Command)
@click.argument("words", nargs=-1, required=True, metavar="[MODEL] TEXT")
@_param
@_timeout
@settings_options("bus")
def embeddings(words: tuple[str, ...], **options: Any) -> int:
    """Print the embedding of a text, as JSON.

    MODEL may be left out where only one is served. TEXT may be `-` for standard input or
    `@FILE`.
    """
    model, text = split_words(words)
    return _ask(model, options, lambda client, name, more: client.embeddings(name, text, **more))


@click.command(cls=Command)
@click.argument("words", nargs=-1, required=True, metavar="[MODEL] TEXT")
@_param
@_timeout
@_json
@settings_options("bus")
def tokenize(words: tuple[str, ...], **options: Any) -> int:
    """Print the token ids of a text.

    MODEL may be left out where only one is served. TEXT may be `-` for standard input or
    `@FILE`.
    """
    model, text = split_words(words)
    return _ask(model, options, lambda client, name, more: client.tokenize(name, text, **more))


@click.command(cls=Command)
@click.argument("words", nargs=-1, required=True, metavar="[MODEL] IDS")
@_param
@_timeout
@_json
@settings_options("bus")
def detokenize(words: tuple[str, ...], **options: Any) -> int:
    """Print the text of token ids.

    IDS are numbers with commas or spaces between; `-` reads standard input, `@FILE` a file.
    """
    model, given = split_words(words)
    ids = numbers(given)
    return _ask(model, options, lambda client, name, more: client.detokenize(name, ids, **more))


def _ask(
    model: str | None,
    options: dict[str, Any],
    send: Callable[[Client, str, dict[str, Any]], Awaitable[Any]],
) -> int:
    body = parse_params(options.pop("params"))
    if (timeout := options.pop("timeout")) is not None:
        body["timeout"] = timeout
    as_json = options.pop("as_json", True)

    async def work(client: Client) -> int:
        name = await model_or_only(client, model)
        async with explaining_absence(client, name):
            answer = await send(client, name, body)
        for warning in answer.warnings:
            click.echo(printable(f"warning: {warning}"), err=True)
        if not as_json and isinstance(answer, TokenizeAnswer):
            click.echo(" ".join(map(str, answer.tokens)))
        elif not as_json and isinstance(answer, DetokenizeAnswer):
            click.echo(answer.text)
        else:
            print_json(answer)
        return 0

    return with_client(options, work)
