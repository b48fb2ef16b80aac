"""Foreign error messages without request content.

Messages go into answers, results and logs; request content must not. SGLang,
pydantic and chat templates quote the values that they refuse.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, Final

LONGEST: Final = 300
SHORTEST_SECRET: Final = 4
"""Shorter strings of a request are words that any message may contain (`user`, `auto`)."""

_QUOTED: Final = re.compile(r"""(['"`]).*?\1""", re.DOTALL)
_ORDINARY: Final = frozenset(
    {"user", "assistant", "system", "developer", "tool", "function", "text", "auto", "none"}
)


def unquoted(error: object) -> str:
    """A message's first line with everything in quotes left out."""
    text = _QUOTED.sub("…", str(error)).strip()
    return (text.splitlines() or ["no reason given"])[0][:LONGEST]


def safe(error: object, request: Any) -> str | None:
    """`unquoted`, or None where it still repeats a string of the request."""
    text = unquoted(error)
    return None if any(leaf in text for leaf in _strings(request)) else text


def _strings(value: Any) -> Iterator[str]:
    stack = [value]
    while stack:
        current = stack.pop()
        if isinstance(current, str):
            if len(current) >= SHORTEST_SECRET and current not in _ORDINARY:
                yield current
        elif isinstance(current, dict):
            stack.extend(current.values())
        elif isinstance(current, list | tuple):
            stack.extend(current)
