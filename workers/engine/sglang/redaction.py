"""Foreign messages without request content and without secrets.

Messages go into answers, results and logs; request content must not. SGLang,
pydantic and chat templates quote the values that they refuse. And SGLang logs
all of its options at the level `info`, API keys among them.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Iterator
from typing import Any, Final

from inferbus.workers.config import HIDDEN

LONGEST: Final = 300
SHORTEST_SECRET: Final = 4
"""Shorter strings of a request, or of an option, are words that any message may contain (`user`, `auto`)."""

_QUOTED: Final = re.compile(r"""(['"`]).*?\1""", re.DOTALL)
_PLACE: Final = re.compile(r"\[\d\d:\d\d:\d\d\] [^\s:]+:\d+: ")
"""What xgrammar puts before its messages: a time of day and a line of its source."""

_QUOTES_REQUESTS: Final = (
    "key_string",
    "Key string",
    "grammar_key",
    "accept_token failed",
    "invalid stop_regex",
)
"""Parts of SGLang's log messages that quote the grammar or the stop pattern of a request."""

_SECRET: Final = re.compile(r"(^|_)(api_key|password|secret|token)$")
"""Names of options whose values are secrets."""

_secrets: set[str] = set()

_ORDINARY: Final = frozenset(
    {"user", "assistant", "system", "developer", "tool", "function", "text", "auto", "none"}
)


def unquoted(error: object) -> str:
    """A message's first line without what is in quotes, and without a place in somebody's source."""
    text = _PLACE.sub("", _QUOTED.sub("…", str(error))).strip()
    return (text.splitlines() or ["no reason given"])[0][:LONGEST]


def safe(error: object, request: Any) -> str | None:
    """`unquoted`, or None where it still repeats a string of the request."""
    text = unquoted(error)
    return None if any(leaf in text for leaf in _strings(request)) else text


def remember_secrets(options: object) -> None:
    """Has `without_secrets` and the log of this process hide the secrets among SGLang's options."""
    names: Iterable[str] = getattr(options, "__struct_fields__", ()) or getattr(options, "__dict__", ())
    values = (getattr(options, name, None) for name in names if _SECRET.search(name))
    _secrets.update(value for value in values if isinstance(value, str) and len(value) >= SHORTEST_SECRET)


def without_secrets(text: str) -> str:
    """A text with every known secret hidden."""
    for secret in _secrets:
        text = text.replace(secret, HIDDEN)
    return text


def redacted_record(*args: Any, **named: Any) -> logging.LogRecord:
    """A factory of log records without secrets, and without messages of SGLang which quote a request."""
    record = logging.LogRecord(*args, **named)
    message = record.getMessage()
    if any(mark in message for mark in _QUOTES_REQUESTS):
        record.msg, record.args = "a grammar or stop pattern of a request failed", ()
    elif (hidden := without_secrets(message)) != message:
        record.msg, record.args = hidden, ()
    return record


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
