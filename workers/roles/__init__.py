"""The programs: prefill, decode, both."""

from __future__ import annotations

from inferbus.workers.roles.worker import run

__all__ = ["run"]
