"""The command group."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Final

import click

from inferbus.workers.cli.text import tolerate_encodings

_COMMANDS: Final = {
    "up": "serve",
    "worker": "serve",
    "gateway": "gateway",
    "chat": "ask",
    "complete": "ask",
    "tokens": "ask",
    "embeddings": "computed",
    "tokenize": "computed",
    "detokenize": "computed",
    "submit": "jobs",
    "result": "jobs",
    "stream": "jobs",
    "cancel": "jobs",
    "batch": "batch",
    "workers": "fleet",
    "health": "fleet",
    "doctor": "doctor",
    "top": "top",
    "jobs": "queues",
    "pause": "queues",
    "resume": "queues",
    "dead": "dead",
    "keys": "keys",
    "streams": "streams",
    "init": "streams",
    "config": "settings",
}
"""The module of every command; only that one is imported."""


class _Lazy(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return [*_COMMANDS, *super().list_commands(ctx)]

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in _COMMANDS:
            return super().get_command(ctx, name)
        module = importlib.import_module(f"inferbus.workers.cli.{_COMMANDS[name]}")
        command: click.Command = getattr(module, name)
        return command


def _version() -> str:
    try:
        return version("inferbus")
    except PackageNotFoundError:
        return "not installed"


@click.group(cls=_Lazy, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(_version(), prog_name="inferbus")
def inferbus() -> None:
    """Batch LLM inference over NATS: prefill and decode workers, and the clients that use them.

    Settings come from flags, the environment (INFERBUS_…) and a TOML file (--config), in this order.
    """


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command; returns its exit code (docs/cli.md lists them)."""
    tolerate_encodings()
    try:
        code = inferbus.main(arguments, prog_name="inferbus", standalone_mode=False)
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except click.Abort:
        click.echo("inferbus: interrupted", err=True)
        return 130
    return code if isinstance(code, int) else 0


if __name__ == "__main__":
    sys.exit(main())
