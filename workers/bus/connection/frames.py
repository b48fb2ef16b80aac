"""One message as the bytes of NATS's protocol, checked before they are made.

A message over the server's limit costs the connection: nats-py closes for good
on "maximum payload violation", and compares the payload alone, without its
headers, with the limit (nats-io/nats.py#896). A line break in a subject would
begin another command. So everything that is sent is checked here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

from inferbus.schemas.errors import InvalidSubject, PayloadTooLarge
from inferbus.schemas.subjects import PUBLISHABLE

MARGIN: Final = 64
"""Kept free of the server's `max_payload`."""

SUBJECT_CHARS: Final = 1800
"""The server's control line has 4,096 bytes for a subject, a reply subject and the sizes."""

_FILTER: Final = re.compile(r"(?:(?:[!-)+,\-/-=?-~]+|\*)\.)*(?:[!-)+,\-/-=?-~]+|\*|>)")
_KEY: Final = re.compile(r"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")
_BREAKS: Final = str.maketrans({"\r": " ", "\n": " ", "\0": " "})
_CACHED: Final = 4096
_CACHED_BYTES: Final = 512

_known: dict[str, bytes] = {}
_known_keys: set[str] = set()
_known_blocks: dict[tuple[tuple[str, str], ...], bytes] = {}


def check_subject(subject: str) -> bytes:
    """A subject that can be published to, as bytes.

    Stricter than the server, which accepts a publish to `a.*` or `a..b` and delivers it to nobody. Valid
    subjects are cached: an answer's chunks all go to one.

    Raises:
        InvalidSubject: Wildcards, empty tokens, white space, control or non-ASCII characters, too long.
    """
    if (known := _known.get(subject)) is not None:
        return known
    if len(subject) > SUBJECT_CHARS or not PUBLISHABLE.fullmatch(subject):
        raise InvalidSubject("not a subject that can be published to")
    if len(_known) >= _CACHED:
        _known.clear()
    return _known.setdefault(subject, subject.encode())


def check_filter(subject: str) -> str:
    """A subject that can be subscribed to; wildcards are fine.

    Raises:
        InvalidSubject: Empty tokens, white space, control or non-ASCII characters, misplaced wildcards.
    """
    if len(subject) > SUBJECT_CHARS or not _FILTER.fullmatch(subject):
        raise InvalidSubject("not a subject that can be subscribed to")
    return subject


def header_block(headers: Mapping[str, str]) -> bytes:
    """The headers as they go over the wire.

    Raises:
        InvalidSubject: A name that is no HTTP token. Line breaks in values become spaces.
    """
    # All chunks of one job have the same headers; building the block takes half of the time to send a chunk.
    items = tuple(headers.items())
    if (known := _known_blocks.get(items)) is not None:
        return known
    block = _made_block(headers)
    if len(_known_blocks) >= _CACHED:
        _known_blocks.clear()
    if len(block) <= _CACHED_BYTES:
        _known_blocks[items] = block
    return block


def _made_block(headers: Mapping[str, str]) -> bytes:
    lines = ["NATS/1.0"]
    for key, value in headers.items():
        if key not in _known_keys:
            if not _KEY.fullmatch(key):
                raise InvalidSubject("a header's name must be printable ASCII without separators")
            if len(_known_keys) < _CACHED:
                _known_keys.add(key)
        lines.append(f"{key}: {value.translate(_BREAKS).strip()}")
    lines.append("\r\n")
    return "\r\n".join(lines).encode(errors="replace")


def publish_frame(
    subject: str, data: bytes, headers: Mapping[str, str] | None, reply: str, max_payload: int
) -> bytes:
    """A PUB or HPUB command.

    Raises:
        PayloadTooLarge: Headers and body together are over `max_payload`.
        InvalidSubject: See `check_subject` and `header_block`.
    """
    target = known if (known := _known.get(subject)) is not None else check_subject(subject)
    if reply:
        target = b"%b %b" % (target, check_subject(reply))
    size = len(data)
    if not headers:
        if size > max_payload:
            raise too_large(size, max_payload)
        return b"PUB %b %d\r\n%b\r\n" % (target, size, data)
    block = header_block(headers)
    size += len(block)
    if size > max_payload:
        raise too_large(size, max_payload)
    return b"HPUB %b %d %d\r\n%b%b\r\n" % (target, len(block), size, block, data)


def payload_size(frame: bytes) -> int:
    """What the server will compare with its limit: headers and body of a frame that was made here."""
    return int(frame[: frame.index(b"\r\n")].rpartition(b" ")[2])


def too_large(size: int, max_payload: int) -> PayloadTooLarge:
    """The error for a message of `size` bytes, headers included."""
    return PayloadTooLarge(f"the message has {size} bytes with its headers; the server takes {max_payload}")
