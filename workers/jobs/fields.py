"""Reading the headers of stored messages."""

from __future__ import annotations

from collections.abc import Mapping


def number(text: str | None) -> int:
    """A header that is a number of at most 18 digits; 0 where it is missing or is none."""
    return int(text) if text and text.isascii() and text.isdigit() and len(text) <= 18 else 0


def without_nats(headers: Mapping[str, str]) -> dict[str, str]:
    """Headers to publish again: NATS's own were about the first message."""
    return {name: text for name, text in headers.items() if not name.startswith("Nats-")}
