"""The order in which lines are sent: those that begin alike are neighbours.

An engine computes a beginning once and finds it in its cache for every other prompt that has it, as long as
it is still there. In a file whose lines take turns between many long system prompts it may not be. So a
stretch of the file is sorted by what the prompts say; a bundle then has lines of one beginning, for one
worker.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import msgspec

from inferbus.workers.batch.lines import Line

LINES: Final = 4096
"""Most lines of a stretch."""

BYTES: Final = 8 * 1024 * 1024
"""Bodies of a stretch, as far as one line is not larger."""

COMPARED: Final = 16 * 1024
"""Bytes of a prompt that count: some thousand tokens."""


class _Prompt(msgspec.Struct, gc=False):
    messages: msgspec.Raw = msgspec.Raw()
    prompt: msgspec.Raw = msgspec.Raw()
    token_ids: msgspec.Raw = msgspec.Raw()


_prompt: Final = msgspec.json.Decoder(_Prompt)


def grouped(lines: Iterator[Line], *, most: int = LINES) -> Iterator[Line]:
    """The same lines, sorted within stretches of so many at most."""
    stretch: list[Line] = []
    size = 0
    for line in lines:
        stretch.append(line)
        size += len(bytes(line.body))
        if len(stretch) >= most or size >= BYTES:
            yield from sorted(stretch, key=_beginning)
            stretch, size = [], 0
    yield from sorted(stretch, key=_beginning)


def _beginning(line: Line) -> bytes:
    """What a prompt says first, as JSON."""
    found = _prompt.decode(line.body)
    return b"".join(bytes(each)[:COMPARED] for each in (found.messages, found.prompt, found.token_ids))
