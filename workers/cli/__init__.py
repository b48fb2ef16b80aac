"""The command `inferbus`. Exit codes and every command: docs/cli.md."""

from __future__ import annotations

from workers.cli.main import main

__all__ = ["main"]
