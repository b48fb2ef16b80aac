"""`inferbus config`: the settings as resolved from all sources."""

from __future__ import annotations

import json
from typing import Any

import click

from inferbus.workers.cli.options import Command, settings_of, settings_options
from inferbus.workers.config import Option, Settings, options


@click.command(cls=Command)
@settings_options("bus", "worker", "streams", "gateway")
def config(**flags: Any) -> int:
    """Print the settings as they are resolved.

    The result of flags, environment and file, in the form of a file. Secrets are hidden.
    """
    # Twice: a value that differs is random, and must not be written into a file.
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
            click.echo(f"{key} = {_toml(option.shown(value))}")
    return 0


def _value(settings: Settings, option: Option) -> Any:
    return getattr(getattr(settings, option.section), option.field)


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{key} = {_toml(each)}" for key, each in value.items()) + " }"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_toml, value))}]"
    if isinstance(value, bool | int | float):
        return json.dumps(value)
    return json.dumps(str(value), ensure_ascii=False)
