"""What a body would cost to build, from one pass over its bytes that builds nothing.

A byte of an encoded body can stand for a hundred bytes of Python objects: `[],` and MessagePack's `0x90` are
a list each. So objects, arrays, members, texts and values are counted first. The pass is made of
calls that run in C and are each short: in a thread, the event loop goes on beside it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

from inferbus.schemas import limits
from inferbus.schemas.errors import UndecodableBody

_PIECE: Final = 1 << 19
"""Bytes of JSON, and values of MessagePack, that one call passes over at most."""

_NO_BACKSLASH: Final = re.compile(rb"[^\\]")
_NO_STRUCTURE: Final = bytes(set(range(256)) - set(b'"[{,:'))

_SCALARS: Final = re.compile(
    rb"(?s:[\x00-\x7f\xc0\xc2\xc3\xe0-\xff]|[\xcc\xd0].|[\xcd\xd1]..|[\xca\xce\xd2]....|[\xcb\xcf\xd3].{8})"
    rb"{1,65536}+"
)
"""MessagePack's numbers, booleans and nil, without backtracking."""

# MessagePack's other types by their first byte: how many bytes of it hold the length, and which bytes follow
# besides those.
_SIZED: Final = {0xC4: (1, 0), 0xC5: (2, 0), 0xC6: (4, 0), 0xD9: (1, 0), 0xDA: (2, 0), 0xDB: (4, 0)}
_EXTENSIONS: Final = {0xC7: (1, 1), 0xC8: (2, 1), 0xC9: (4, 1)}
_FIXED_EXTENSIONS: Final = {0xD4: 2, 0xD5: 3, 0xD6: 5, 0xD7: 9, 0xD8: 17}
_TEXTS: Final = _SIZED | _EXTENSIONS
_ARRAYS: Final = {0xDC: 2, 0xDD: 4}
_MAPS: Final = {0xDE: 2, 0xDF: 4}


def check(data: bytes, *, msgpack: bool, parts: int = limits.PARTS, values: int = limits.VALUES) -> None:
    """Refuses a body that would cost far more memory and time than its size says.

    What is no JSON or MessagePack is left to the decoder: up to the first fault the count is exact.

    Args:
        data: As received.
        msgpack: MessagePack instead of JSON.
        parts: Most objects, arrays, members and texts together.
        values: Most elements of arrays and members of objects.

    Raises:
        UndecodableBody: It holds more.
    """
    if len(data) <= parts:
        return
    for found_parts, found_values in _count_msgpack(data) if msgpack else _count_json(data):
        if found_parts > parts:
            raise UndecodableBody(f"the body holds more than {parts} objects, arrays, members and texts")
        if found_values > values:
            raise UndecodableBody(f"the body holds more than {values} values")


def _count_json(data: bytes) -> Iterator[tuple[int, int]]:
    """Growing counts of parts and values; exact at the end, too small before."""
    if b"\\" not in data:
        structure = data.translate(None, _NO_STRUCTURE)
        yield structure.count(b'"') // 2, 0
    else:
        structure, quotes = b"", 0
        for piece in _pieces(data):
            # In this order: what is left of `\\\"` is `\"`.
            bare = piece.replace(rb"\\", b"").replace(rb"\"", b"").translate(None, _NO_STRUCTURE)
            quotes += bare.count(b'"')
            yield quotes // 2, 0
            structure += bare
    texts = structure.count(b'"') // 2
    outside = b"".join(structure.split(b'"')[::2])
    containers, members = outside.count(b"[") + outside.count(b"{"), outside.count(b":")
    yield texts + containers + members, containers + outside.count(b",")


def _pieces(data: bytes) -> Iterator[bytes]:
    """Cut where no backslash is in front, so that no escape is cut in two."""
    start = 0
    while start < len(data):
        found = _NO_BACKSLASH.search(data, start + _PIECE)
        end = len(data) if found is None else found.end()
        yield data[start:end]
        start = end


def _count_msgpack(data: bytes) -> Iterator[tuple[int, int]]:
    """Growing counts of parts and values."""
    parts = values = at = 0
    while at < len(data):
        if (run := _SCALARS.match(data, at)) is not None:
            at = run.end()
            continue
        first = data[at]
        at += 1
        if 0xA0 <= first <= 0xBF:
            at += first & 31
        elif 0x80 <= first <= 0x8F:
            parts, values = parts + (first & 15), values + (first & 15)
        elif 0x90 <= first <= 0x9F:
            values += first & 15
        elif first in _TEXTS:
            width, more = _TEXTS[first]
            at += width + more + int.from_bytes(data[at : at + width])
        elif first in _FIXED_EXTENSIONS:
            at += _FIXED_EXTENSIONS[first]
        elif first in _ARRAYS:
            values += int.from_bytes(data[at : at + _ARRAYS[first]])
            at += _ARRAYS[first]
        elif first in _MAPS:
            members = int.from_bytes(data[at : at + _MAPS[first]])
            parts, values = parts + members, values + members
            at += _MAPS[first]
        else:
            return  # No type of MessagePack, or cut off in the middle of a number.
        parts += 1
        yield parts, values
