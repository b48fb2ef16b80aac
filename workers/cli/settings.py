"""`inferbus config`: what all sources together amount to."""

from __future__ import annotations

import json
from typing import Any

import click

from inferbus.workers.cli.options import Command, settings_of, settings_options
from inferbus.workers.config import HIDDEN, Option, Settings, hide_userinfo, options


@click.command(cls=Command)
@settings_options("bus", "worker", "streams")
def config(**flags: Any) -> int:
    """Print the settings as they are resolved.

    What flags, environment and file amount to, as a file would hold it. Secrets are hidden.
    """
    # Twice: what differs is drawn at random, and must not be written into a file.
    settings, other = settings_of(dict(flags)), settings_of(dict(flags))
    table = ""
    for option in options():
        name, key = option.key.split(".")
        if name != table:
            click.echo(f"{chr(10) if table else ''}[{name}]")
            table = name
        value = _value(settings, option)
        if value is None or value != _value(other, option):
            click.echo(f"# {key} = {'not set' if value is None else 'random'}")
        else:
            click.echo(f"{key} = {_toml(_shown(option, value))}")
    return 0


def _value(settings: Settings, option: Option) -> Any:
    return getattr(getattr(settings, option.section), option.field)


def _shown(option: Option, value: Any) -> Any:
    if option.secret:
        return HIDDEN
    return [hide_userinfo(url) for url in value] if option.field == "urls" else value


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{key} = {_toml(each)}" for key, each in value.items()) + " }"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_toml, value))}]"
    if isinstance(value, bool | int | float):
        return json.dumps(value)
    return json.dumps(str(value), ensure_ascii=False)
