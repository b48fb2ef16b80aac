"""Bytes that are nearly of the contract: values are changed, then encoded, then single bytes are changed."""

from __future__ import annotations

import json
import random
import struct
from collections.abc import Sequence
from typing import Any, Final

import msgspec

from inferbus.schemas import codec

NUMBERS: Final = (0, -1, 1, 2**31, 2**53 + 1, 2**63, -(2**63) - 1, 2**64, 10**30, 1e308, -0.0, 16.0, 1e-320)
TEXTS: Final = (
    "",
    "\x00",
    "\x1b[2J",
    "a.b",
    "*",
    ">",
    "$JS.API.INFO",
    "_INBOX.>",
    "\r\nPUB x 0\r\n",
    "=00",
    "=zz",
    "live",
    "nan",
    "-1",
    "1e400",
    "9" * 5_000,
    "x" * 300,
    "\N{CYRILLIC SMALL LETTER A}\N{COMBINING ACUTE ACCENT}",
    "\U0001f600",
    "2026-01-01T00:00:00+23:59",
    "9999-12-31T23:59:59.9-23:59",
    "tokens",
    "\N{ARABIC-INDIC DIGIT ONE}",
)
LETTERS: Final = "aZ09_-=.*>$ \t\r\n\0\x0b\x7f\xe9\ud800:;,/+"
RAW: Final = (
    (b"NaN", b"\xcb\x7f\xf8" + bytes(6)),
    (b"1e999", b"\xca\xff\x80\x00\x00"),
    (rb'"\ud800"', b"\xa3\xed\xa0\x80"),
    (b'"\xff\xfe"', b"\xa2\xff\xfe"),
    (b"1" * 5_000, b"\xcf" + b"\xff" * 8),
    (b"[" * 5_000, b"\x91" * 5_000),
    (b'{"a":' * 3_000, b"\x81\xa1a" * 3_000),
    (b"[" * 70 + b"]" * 70, b"\x91" * 70 + b"\x90"),
    (b'"unended', b"\xdd\xff\xff\xff\xff"),
    (b"{,}", b"\xdf\xff\xff\xff\xff"),
    (b"[1,]", b"\xd6\xff\xff\xff\xff\xff"),
    (b"tru", b"\xc7\x0c\xff" + b"\xff" * 12),
    (b'"\\x41"', b"\xc4\x02ab"),
    (b"", b"\xc1"),
    (b'{"a":1,"a":2}', b"\x82\xa1a\x01\xa1a\x02"),
    (b"1.", b"\x81\x90\x01"),
    (b"[" + b"[]," * 2_000 + b"1]", b"\xdc\x07\xd0" + b"\x90" * 2_000),
)
"""Values that no encoder makes, as JSON and as MessagePack."""


class Raw(msgspec.Struct, frozen=True):
    """A value of `RAW`."""

    index: int


class Mutator:
    """Makes inputs from one seed, always the same ones.

    Args:
        seed: Of the random numbers.
        names: Names of fields worth setting.
    """

    def __init__(self, seed: str, names: Sequence[str] = ()) -> None:
        self.random = random.Random(seed)
        self._names = [*names, "", "x"]

    def body(self, values: Sequence[Any], kind: str) -> bytes:
        """One of these values, changed, as bytes of a content type."""
        value = self.random.choice(values)
        for _ in range(self.random.choice((0, 1, 1, 1, 2, 3))):
            value = self._changed(value)
        data = self._msgpack(value) if kind == codec.MSGPACK else self._json(value)
        return self.scrambled(data) if self.random.random() < 0.25 else data

    def scrambled(self, data: bytes) -> bytes:
        """Bytes with a few of them changed, removed or doubled."""
        pick, out = self.random, bytearray(data)
        for _ in range(pick.choice((1, 1, 2, 4))):
            at = pick.randrange(len(out) + 1)
            match pick.randrange(4):
                case 0:
                    out[at : at + 1] = pick.randbytes(1)
                case 1:
                    del out[at : at + pick.choice((1, 2, 8, 1_000))]
                case 2:
                    out[at:at] = pick.choice((pick.randbytes(3), b'"', b"[", b"\\", b"\xff", b"\xdd\x7f\xff"))
                case 3:
                    out[at:at] = out[at : at + 16]
        return bytes(out)

    def text(self) -> str:
        """A word that somebody might put into a header or a subject."""
        pick = self.random
        if pick.random() < 0.5:
            return pick.choice(TEXTS)
        return "".join(pick.choice(LETTERS) for _ in range(pick.randrange(24)))

    def subject(self, subjects: Sequence[str]) -> str:
        """One of these subjects, with its tokens changed."""
        pick, tokens = self.random, self.random.choice(subjects).split(".")
        for _ in range(pick.choice((0, 1, 1, 2))):
            at = pick.randrange(len(tokens) + 1)
            tokens[at : at + pick.randrange(2)] = [self.text()] * pick.randrange(2)
        return ".".join(tokens)

    def headers(self, names: Sequence[str], values: Sequence[str] = ()) -> dict[str, str]:
        """A few headers of these names."""
        pick = self.random
        chosen = pick.sample(names, pick.choice((0, 1, 2, 2, len(names))))
        return {
            name: pick.choice(values) if values and pick.random() < 0.4 else self.text() for name in chosen
        }

    def _scalar(self) -> Any:
        pick = self.random
        return pick.choice(
            (
                pick.choice(NUMBERS),
                pick.choice(TEXTS),
                Raw(pick.randrange(len(RAW))),
                pick.choice((True, False, None)),
                pick.choice(([], {}, [[]], [{}], {"": None}, [None], [1, "a", None])),
                pick.randint(-300, 70_000),
            )
        )

    def _changed(self, value: Any, depth: int = 0) -> Any:
        """A copy that differs somewhere."""
        pick = self.random
        if isinstance(value, dict) and depth < 6:
            value = dict(value)
            name = pick.choice(list(value)) if value else ""
            match pick.randrange(5):
                case 0:
                    value.pop(name, None)
                case 1:
                    value[pick.choice(self._names)] = self._scalar()
                case 2 if value:
                    value[pick.choice(self._names)] = value[name]
                case _ if value:
                    value[name] = self._changed(value[name], depth + 1)
            return value
        if isinstance(value, list) and depth < 6:
            value = list(value)
            at = pick.randrange(len(value) + 1)
            match pick.randrange(4):
                case 0:
                    del value[at : at + 1]
                case 1:
                    value.insert(at, self._scalar())
                case 2:
                    value = (value * 40)[:2_000]
                case _ if at < len(value):
                    value[at] = self._changed(value[at], depth + 1)
            return value
        return self._scalar()

    def _json(self, value: Any) -> bytes:
        if isinstance(value, Raw):
            return RAW[value.index][0]
        if isinstance(value, dict):
            return b"{%b}" % b",".join(self._json(name) + b":" + self._json(v) for name, v in value.items())
        if isinstance(value, list):
            return b"[%b]" % b",".join(map(self._json, value))
        return json.dumps(value, ensure_ascii=self.random.random() < 0.5).encode("utf-8", "surrogatepass")

    def _msgpack(self, value: Any) -> bytes:
        if isinstance(value, Raw):
            return RAW[value.index][1]
        if isinstance(value, dict):
            parts = (self._key(name) + self._msgpack(v) for name, v in value.items())
            return struct.pack(">BH", 0xDE, len(value)) + b"".join(parts)
        if isinstance(value, list):
            return struct.pack(">BH", 0xDC, len(value)) + b"".join(map(self._msgpack, value))
        if isinstance(value, str):
            data = value.encode("utf-8", "surrogatepass")
            return struct.pack(">BI", 0xDB, len(data)) + data
        if isinstance(value, int) and not -(2**63) <= value < 2**64:
            return RAW[4][1]
        return msgspec.msgpack.encode(value)

    def _key(self, name: str) -> bytes:
        odd = self.random.random() < 0.01
        return self.random.choice((b"\x01", b"\xc0", b"\x90", b"\xa1\xff")) if odd else self._msgpack(name)
