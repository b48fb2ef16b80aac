"""Options of the command line, derived from the settings."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, TypeVar

import click

from inferbus.workers.config import ConfigError, Option, Settings, options, resolve, unknown_variables

F = TypeVar("F", bound=Callable[..., Any])

CONFIG_ENV: Final = "INFERBUS_CONFIG"
_TITLES: Final = {"bus": "NATS", "worker": "Worker", "streams": "Streams", "gateway": "Gateway"}


class SettingOption(click.Option):
    """An option for a setting; `section` groups it in the help."""

    def __init__(self, *args: Any, section: str, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.section = section


class Command(click.Command):
    """A command whose help lists its own options before the settings."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Writes the options by section."""
        sections: dict[str, list[tuple[str, str]]] = {"Options": []}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx) if isinstance(param, click.Option) else None
            if record is not None:
                section = _TITLES[param.section] if isinstance(param, SettingOption) else "Options"
                sections.setdefault(section, []).append(record)
        for title, records in sections.items():
            with formatter.section(title):
                formatter.write_dl(records)


def settings_options(*sections: str) -> Callable[[F], F]:
    """Gives a command the options of these sections, and `--config`."""

    def decorate(command: F) -> F:
        for option in reversed(options(*sections)):
            command = _decorator(option)(command)
        return click.option(
            "--config",
            type=click.Path(dir_okay=False, path_type=Path),
            envvar=CONFIG_ENV,
            help=f"TOML file with settings.  [env {CONFIG_ENV}]",
        )(command)

    return decorate


def settings_of(flags: dict[str, Any]) -> Settings:
    """The settings from a command's options, the environment and the file; removes them from `flags`.

    Raises:
        click.UsageError: Listing everything that is wrong.
    """
    file = flags.pop("config", None)
    names = {option.name for option in options()}
    given = {name: flags.pop(name) for name in list(flags) if name in names}
    for line in unknown_variables(os.environ):
        click.echo(f"inferbus: warning: {line}", err=True)
    try:
        return resolve(given, os.environ, file)
    except ConfigError as error:
        raise click.UsageError(str(error)) from None


def _decorator(option: Option) -> Callable[[F], F]:
    flag = option.flag
    if option.type is bool:
        flag = f"{flag}/--no-{flag.removeprefix('--')}"
    return click.option(
        flag,
        option.name,
        cls=SettingOption,
        section=option.section,
        default=None,
        multiple=option.multiple,
        metavar=None if option.type is bool else _METAVARS.get(option.type, "TEXT"),
        help=_help(option),
    )


_METAVARS: Final = {int: "N", float: "NUMBER", Path: "FILE"}


def _help(option: Option) -> str:
    default = option.default
    if isinstance(default, tuple):
        default = ", ".join(map(str, default))
    shown = "" if default in (None, "") or option.secret else f"default {default}; "
    return f"{option.help}  [{shown}env {option.env}]"
