"""The programs: prefill, decode, both."""

from __future__ import annotations

from workers.roles.worker import run

__all__ = ["run"]
