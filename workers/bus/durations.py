"""Durations as NATS counts them: in nanoseconds."""

from __future__ import annotations

from typing import Final

_NANO: Final = 1_000_000_000


def nanoseconds(seconds: float) -> int:
    """For the server."""
    return round(seconds * _NANO)


def seconds(nanoseconds: int) -> float:
    """From the server."""
    return nanoseconds / _NANO
