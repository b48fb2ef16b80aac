"""Reading the headers of stored messages."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final
from urllib.parse import quote

_NAME_MARKS: Final = "!#$&'*+-.^_`|~"
"""What a header's name may hold besides letters, digits and `%`."""

_UNPRINTABLE: Final = re.compile("[^ -~\\u00a0-\\ud7ff\\ue000-\\U0010ffff]+")


def number(text: str | None) -> int:
    """A header that is a number of at most 18 digits; 0 where it is missing or is none."""
    return int(text) if text and text.isascii() and text.isdigit() and len(text) <= 18 else 0


def without_nats(headers: Mapping[str, str]) -> dict[str, str]:
    """Headers to publish again: NATS's own were about the first message."""
    return {name: text for name, text in headers.items() if not name.startswith("Nats-")}


def publishable(headers: Mapping[str, str]) -> dict[str, str]:
    """Headers as a client sent them, fit to be published and shown: percent-encoded where they are not."""
    return {
        _quoted(name, _NAME_MARKS): _UNPRINTABLE.sub(lambda found: _quoted(found[0], ""), text)
        for name, text in headers.items()
        if name
    }


def _quoted(text: str, safe: str) -> str:
    return quote(text.encode("utf-8", "surrogatepass"), safe=safe)
