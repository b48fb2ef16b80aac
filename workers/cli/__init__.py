"""The command `inferbus`. Exit codes and every command: docs/cli.md."""

from __future__ import annotations

from inferbus.workers.cli.main import main

__all__ = ["main"]
