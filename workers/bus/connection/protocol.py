"""NATS's protocol as this process reads it: commands, subjects, header blocks.

Any client may publish a subject or a header block that is not text, and the server forwards it. nats-py's
parser stops reading at some of them. At characters that are white space to a regular expression and not to
the server it takes one field for the next, so that a message reaches another subscription. This parser
splits fields as the server joins them, by single spaces, and decoding never fails: what is not text is
marked. After bytes that are no NATS protocol nothing can be trusted, so that the connection is made again.
"""

from __future__ import annotations

import json
import re
from typing import Any, Final, NamedTuple

import structlog
from nats.errors import ProtocolError

from inferbus.schemas.headers import escaped
from inferbus.workers.bus.connection.message import NO_HEADERS, Message
from inferbus.workers.observe import defects

log = structlog.get_logger()

LINE: Final = 1024 * 1024
"""Longest control line in bytes; INFO names every server of a cluster."""

PAYLOAD: Final = 128 * 1024 * 1024
"""Largest message in bytes; the server takes 64 MiB, and adds headers to what it has stored."""

_CRLF: Final = b"\r\n"
_FIRST: Final = re.compile(rb"NATS/1\.0(?:[ \t]+(\d{3})(?:[ \t]+([^\r\n]*))?)?[ \t]*")
_NAME: Final = re.compile(rb"[!-9;-~]+")
_CACHED: Final = 4096
_CACHED_BYTES: Final = 512
_CACHED_LINES: Final = 16384


class Headers(dict[str, str]):
    """A message's headers; where a name is repeated, the last value.

    Attributes:
        raw: The block as received.
        status: Of the status line, three digits; empty where there is none.
        description: Of the status line.
        repeated: The names that occur more than once.
        malformed: The block does not begin as one must; what looks like a header in it is there.
    """

    __slots__ = ("description", "malformed", "raw", "repeated", "status")

    def __init__(self, raw: bytes) -> None:
        super().__init__()
        self.raw = raw
        first, end, rest = raw.partition(_CRLF)
        match = _FIRST.fullmatch(first) if end else None
        self.malformed = match is None
        status, description = match.groups() if match is not None else (None, None)
        self.status = status.decode() if status else ""
        self.description = description.decode(errors="replace").strip() if description else ""
        repeated = []
        for line in rest.split(_CRLF):
            name, colon, value = line.partition(b":")
            # Others skip such a line as well: nats.go and nats-server read only what has a name.
            if not colon or not _NAME.fullmatch(name := name.strip()):
                continue
            if (key := name.decode()) in self:
                repeated.append(key)
            self[key] = value.strip().decode(errors="replace")
        self.repeated = tuple(repeated)


_known: dict[bytes, Headers] = {}


def read_headers(raw: bytes) -> Headers:
    """The headers of a block; the same object for the same bytes, as all chunks of a job have the same."""
    if (known := _known.get(raw)) is not None:
        return known
    headers = Headers(raw)
    if len(raw) <= _CACHED_BYTES:
        if len(_known) >= _CACHED:
            _known.clear()
        _known[raw] = headers
    return headers


def read_subject(raw: bytes) -> str | None:
    """A subject as text; None where it is none, or holds control characters."""
    try:
        text = raw.decode()
    except UnicodeDecodeError:
        return None
    return text if text.isprintable() else None


class _Line(NamedTuple):
    """The control line of a message.

    Attributes:
        subject: As text, escaped where it is none.
        sid: The subscription's number.
        reply: As the subject.
        headers: Bytes of the header block.
        size: Bytes of block and body together.
        sound: Whether both subjects are text.
        raw: Both subjects as received.
    """

    subject: str
    sid: int
    reply: str
    headers: int
    size: int
    sound: bool
    raw: tuple[bytes, bytes]


_lines: dict[bytes, _Line] = {}
"""Control lines by their bytes: the chunks of an answer differ in their sizes, if at all."""


def _read_line(line: bytes) -> _Line:
    known = _read_fields(line.split(b" "))
    if len(line) <= _CACHED_BYTES:
        if len(_lines) >= _CACHED_LINES:
            _lines.clear()
        _lines[line] = known
    return known


class Parser:
    """Takes the place of nats-py's `Parser`.

    Args:
        client: Its methods `_process_…` are called with what arrives, and what `direct` names with messages.
    """

    def __init__(self, client: Any) -> None:
        self._client = client
        self.reset()

    @property
    def waiting(self) -> bool:
        """Whether a command has begun and not ended."""
        return self._have > 0

    def reset(self) -> None:
        """Forgets what was received: this is a new connection."""
        self._parts: list[bytes] = []
        self._have = 0
        self._need = 0

    async def parse(self, data: bytes = b"") -> None:
        """Takes bytes as they arrive, in any pieces.

        Raises:
            ProtocolError: They are no NATS protocol; nothing behind them can be understood.
        """
        try:
            await self._parse(data)
        except ProtocolError:
            raise
        except Exception as error:  # supervision point: nats-py would read no more, and not tell
            defects.exception("bus.read_failed")
            raise ProtocolError from error

    async def _parse(self, data: bytes) -> None:
        parts = self._parts
        parts.append(data)
        self._have += len(data)
        if self._have < self._need:
            return
        received = b"".join(parts) if len(parts) > 1 else data
        start, direct = 0, self._client.direct
        while (end := received.find(_CRLF, start)) >= 0:
            line = received[start:end]
            known = _lines.get(line)
            if known is None and line[:4] in (b"MSG ", b"HMSG"):
                known = _read_line(line)
            if known is not None:
                subject, sid, reply, headers, size, sound, raw = known
                body = end + 2
                after = body + size
                if len(received) < after + 2:
                    self._keep(received[start:], after + 2 - start)
                    return
                if not received.startswith(_CRLF, after):
                    raise ProtocolError
                start = after + 2
                block = received[body : body + headers] if headers else None
                data = received[body + headers : after]
                if (deliver := direct(sid)) is None:
                    await self._client._process_msg(sid, raw[0], raw[1], data, block)
                elif block is None and sound:
                    deliver(Message(subject, data, NO_HEADERS, reply))
                else:
                    deliver(_message(subject, reply, data, block, sound=sound))
            else:
                start = end + 2
                await self._command(line)
            if self._parts is not parts:
                # The connection was lost or given up meanwhile.
                return
        if len(received) - start > LINE:
            raise ProtocolError
        self._keep(received[start:], 0)

    def _keep(self, rest: bytes, need: int) -> None:
        """What is not complete, and the bytes that make it so, as far as that is known."""
        self._parts[:] = [rest] if rest else []
        self._have, self._need = len(rest), need

    async def _command(self, line: bytes) -> None:
        client, word = self._client, line[:4].rstrip()
        if word == b"PING":
            await client._process_ping()
        elif word == b"PONG":
            await client._process_pong()
        elif word == b"-ERR":
            await client._process_err(line[4:].strip().decode(errors="backslashreplace").lower())
        elif word == b"INFO":
            await client._process_info(_info(line[4:]))
        elif word != b"+OK":
            raise ProtocolError


def _message(subject: str, reply: str, data: bytes, block: bytes | None, *, sound: bool) -> Message:
    if block is None:
        return Message(subject, data, NO_HEADERS, reply, undecodable=None if sound else b"")
    headers = read_headers(block)
    return Message(
        subject,
        data,
        headers,
        reply,
        headers.status,
        headers.description,
        headers.repeated,
        None if sound and not headers.malformed else block,
    )


def _read_fields(fields: list[bytes]) -> _Line:
    match fields:
        case [b"MSG", subject, sid, size]:
            reply, headers = b"", b"0"
        case [b"MSG", subject, sid, reply, size]:
            headers = b"0"
        case [b"HMSG", subject, sid, headers, size]:
            reply = b""
        case [b"HMSG", subject, sid, reply, headers, size]:
            pass
        case _:
            raise ProtocolError
    if not (sid.isdigit() and headers.isdigit() and size.isdigit()) or len(size) > 9 or len(headers) > 9:
        raise ProtocolError
    if not int(headers) <= int(size) <= PAYLOAD:
        raise ProtocolError
    target, answer = read_subject(subject), read_subject(reply)
    return _Line(
        escaped(subject) if target is None else target,
        int(sid),
        escaped(reply) if answer is None else answer,
        int(headers),
        int(size),
        target is not None and answer is not None,
        (subject, reply),
    )


def _info(text: bytes) -> dict[str, Any]:
    try:
        info = json.loads(text)
    except (ValueError, RecursionError):
        raise ProtocolError from None
    if not isinstance(info, dict):
        raise ProtocolError
    urls = info.get("connect_urls") or []
    if not isinstance(urls, list) or not all(isinstance(url, str) for url in urls):
        raise ProtocolError
    return info
