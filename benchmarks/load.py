"""A load generator that costs little, so that it is not what is measured: NATS's protocol on a bare socket.

It keeps a number of live requests open at a time, counts the messages that come back by the lengths that the
server states, and checks every end mark: an answer that failed, or lost a chunk, fails the reading.
"""

from __future__ import annotations

import json
import re
import secrets
import socket
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Final, Self
from urllib.parse import urlsplit

import msgspec

from schemas import headers

SILENCE: Final = 60.0
"""Seconds without a byte after which a reading has failed."""
BLOCK: Final = 512 * 1024
SHOWN: Final = 400
"""Bytes of a message in an error."""

_OPTIONS: Final = {
    "verbose": False,
    "pedantic": False,
    "headers": True,
    "no_responders": True,
    "lang": "python",
    "version": "0",
    "name": "inferbus benchmark",
}
_STATUS: Final = re.compile(rf"\r\n{headers.STATUS}: (\w+)\r\n".encode())
_CHUNKS: Final = re.compile(rf"\r\n{headers.CHUNKS}: (\d+)\r\n".encode())


class LoadFailed(Exception):
    """An answer was not what it should have been; there is no figure to be had from that."""


class Tally(msgspec.Struct, kw_only=True):
    """What came back.

    Attributes:
        seconds: From the first request sent to the last end mark received.
        chunks: Messages before the end marks.
        bytes: Their bodies.
        first: Seconds from sending a request to its first chunk, in the order of arrival.
        cpu: Processor seconds that counting took.
    """

    seconds: float = 0.0
    chunks: int = 0
    bytes: int = 0
    first: list[float] = []
    cpu: float = 0.0


class Wire:
    """One connection.

    Args:
        url: Of the server.
    """

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._socket = socket.create_connection((parts.hostname, parts.port or 4222), timeout=SILENCE)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._inbox = f"_INBOX.{secrets.token_hex(11)}"
        self._runs = 0
        connect = json.dumps(_OPTIONS).encode()
        self._socket.sendall(b"CONNECT %b\r\nSUB %b.> 1\r\nPING\r\n" % (connect, self._inbox.encode()))
        greeting = b""
        while not greeting.endswith(b"PONG\r\n"):
            greeting += self._receive()

    def close(self) -> None:
        """Closes the connection."""
        self._socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def run(
        self,
        subject: str,
        bodies: Sequence[bytes],
        *,
        concurrency: int = 1,
        pause: float = 0.0,
        moments: dict[bytes, list[float]] | None = None,
    ) -> Tally:
        """Sends every request, some at a time, and returns once all are answered.

        Args:
            subject: Where to.
            bodies: One a request.
            concurrency: Requests that are open at a time; the next is sent when one has ended.
            pause: Seconds before every request but the first ones.
            moments: Takes the time of every chunk, by its answer's subject.

        Raises:
            LoadFailed: An answer was an error, lost a chunk, or did not come.
        """
        run = _Run(f"{self._inbox}.{self._runs}".encode(), subject.encode(), bodies, moments)
        self._runs += 1
        cpu, started = time.thread_time(), time.perf_counter()
        self._send(run, concurrency)
        rest = b""
        while not run.over:
            rest, ended = run.read(rest + self._receive())
            if run.pinged:
                self._socket.sendall(b"PONG\r\n")
                run.pinged = False
            if ended:
                if pause:
                    time.sleep(pause)
                self._send(run, ended)
        run.tally.seconds = time.perf_counter() - started
        run.tally.cpu = time.thread_time() - cpu
        if run.tally.chunks != run.stated:
            raise LoadFailed(f"{run.tally.chunks} chunks came of {run.stated} that were sent")
        return run.tally

    def _send(self, run: _Run, count: int) -> None:
        frames = run.next_frames(count)
        if frames:
            self._socket.sendall(frames)

    def _receive(self) -> bytes:
        try:
            block = self._socket.recv(BLOCK)
        except TimeoutError:
            raise LoadFailed(f"nothing came for {SILENCE:g} s") from None
        if not block:
            raise LoadFailed("the server closed the connection")
        return block


class _Run:
    """The requests of one reading, and what came back so far.

    Attributes:
        tally: So far.
        stated: Chunks that the end marks tell of.
        pinged: Whether the server waits for a PONG.
    """

    def __init__(
        self,
        inbox: bytes,
        subject: bytes,
        bodies: Sequence[bytes],
        moments: dict[bytes, list[float]] | None,
    ) -> None:
        self.tally = Tally()
        self.stated = 0
        self.pinged = False
        self._inbox = inbox
        self._subject = subject
        self._bodies = bodies
        self._moments = moments
        self._sent = 0
        self._ended = 0
        self._waiting: dict[bytes, float] = {}

    @property
    def over(self) -> bool:
        """Whether every request has its answer."""
        return self._ended == len(self._bodies)

    def next_frames(self, count: int) -> bytes:
        """The next requests; their clocks start now."""
        frames = []
        for number in range(self._sent, min(self._sent + count, len(self._bodies))):
            reply, body = b"%b.%d" % (self._inbox, number), self._bodies[number]
            frames.append(b"PUB %b %b %d\r\n%b\r\n" % (self._subject, reply, len(body), body))
            self._waiting[reply] = 0.0
        now = time.perf_counter()
        for number in range(self._sent, self._sent + len(frames)):
            self._waiting[b"%b.%d" % (self._inbox, number)] = now
        self._sent += len(frames)
        return b"".join(frames)

    def read(self, data: bytes) -> tuple[bytes, int]:
        """Takes the whole messages in `data`; what is left over, and how many answers ended."""
        now, position, ended = time.perf_counter(), 0, 0
        waiting, chunks, size_of_all, body = self._waiting, 0, 0, 0
        while (eol := data.find(b"\r\n", position)) >= 0:
            words = data[position:eol].split(b" ")
            verb = words[0]
            if verb not in (b"MSG", b"HMSG"):
                self._other(verb, data[position:eol])
                position = eol + 2
                continue
            # MSG <subject> <sid> [reply] <size>; HMSG has the size of its headers before that.
            size = int(words[-1])
            end = eol + 4 + size
            if end > len(data):
                break
            if verb == b"HMSG":
                self._end(data[eol + 2 : end], data[body:position], empty=int(words[-2]) == size)
                ended += 1
            else:
                chunks += 1
                body = eol + 2
                size_of_all += size
                if waiting and (sent := waiting.pop(words[1], None)) is not None:
                    self.tally.first.append(now - sent)
                if self._moments is not None:
                    self._moments.setdefault(words[1], []).append(now)
            position = end
        self.tally.chunks += chunks
        self.tally.bytes += size_of_all
        self._ended += ended
        return data[position:], ended

    def _other(self, verb: bytes, line: bytes) -> None:
        if verb == b"PING":
            self.pinged = True
        elif verb == b"-ERR":
            raise LoadFailed(f"the server said {line.decode(errors='replace')}")

    def _end(self, block: bytes, before: bytes, *, empty: bool) -> None:
        status, count = _STATUS.search(block), _CHUNKS.search(block)
        if not empty or status is None or count is None or status[1] != b"ok":
            text = b"%b; the message before it: %b" % (block.strip(), before[:SHOWN].strip())
            raise LoadFailed(f"an answer ended with {text.decode(errors='replace')!r}")
        self.stated += int(count[1])


def encode(body: dict[str, Any]) -> bytes:
    """A request's body."""
    return msgspec.json.encode(body)
