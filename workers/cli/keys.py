"""`inferbus keys`: API keys of the gateway, in NATS."""

from __future__ import annotations

from typing import Any, Final

import click

from inferbus.workers.cli.options import Command, settings_options
from inferbus.workers.cli.running import note, with_client
from inferbus.workers.cli.tables import moment, print_table
from inferbus.workers.cli.text import print_json
from inferbus.workers.client import Client
from inferbus.workers.client.keys import KeyBucket

_LIMIT: Final = click.IntRange(min=1)


@click.group()
def keys() -> None:
    """Add, list and remove API keys of the gateway.

    Every gateway that runs with --gateway-stored-keys knows of a change within a second. NATS has the keys'
    digests only.
    """


@keys.command(cls=Command)
@click.argument("name")
@click.option("--owner", metavar="OWNER", required=True, help="Whose requests it sends.")
@click.option(
    "--requests-per-minute", type=_LIMIT, metavar="N", help="Default: --gateway-requests-per-minute."
)
@click.option("--concurrency", type=_LIMIT, metavar="N", help="Default: --gateway-concurrency.")
@settings_options("bus")
def add(
    name: str, owner: str, requests_per_minute: int | None, concurrency: int | None, **options: Any
) -> int:
    """Make an API key, and print it: this once, it is stored nowhere.

    NAME is for people and logs. To replace a key, add another one, and remove the old one later.
    """

    async def work(client: Client) -> int:
        bucket = KeyBucket(client.bus)
        key = await bucket.add(name, owner, requests_per_minute=requests_per_minute, concurrency=concurrency)
        click.echo(key)
        note("this is the only time that the key is shown")
        return 0

    return with_client(options, work)


@keys.command("ls", cls=Command)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@settings_options("bus")
def list_keys(as_json: bool, **options: Any) -> int:
    """List the API keys: names, owners and limits, but not the keys."""

    async def work(client: Client) -> int:
        found = [
            {
                "name": each.name,
                "owner": each.owner,
                "requests_per_minute": each.requests_per_minute,
                "concurrency": each.concurrency,
                "created": moment(each.created),
            }
            for each in await KeyBucket(client.bus).all()
        ]
        if as_json:
            print_json(found)
        elif found:
            columns = ("name", "owner", "requests/min", "concurrency", "created")
            print_table(columns, (tuple(each.values()) for each in found))
        else:
            click.echo("no API keys", err=True)
        return 0

    return with_client(options, work)


@keys.command(cls=Command)
@click.argument("name", nargs=-1, required=True)
@settings_options("bus")
def rm(name: tuple[str, ...], **options: Any) -> int:
    """Remove API keys. What they have asked for goes on; they ask for nothing new."""

    async def work(client: Client) -> int:
        for each in name:
            await KeyBucket(client.bus).remove(each)
        return 0

    return with_client(options, work)
