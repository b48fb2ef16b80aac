"""A load generator that costs little, so that it is not what is measured: NATS's protocol on a bare socket.

It keeps a number of live requests open at a time, counts the messages that come back by the lengths that the
server states, and checks every end mark: an answer that failed, or lost a chunk, fails the reading. Or it
sends requests at given moments, however many are open (`Wire.paced`), and tells of each what became of it.
"""

from __future__ import annotations

import contextlib
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

from inferbus.schemas import headers

SILENCE: Final = 60.0
"""Seconds without a byte after which a reading has failed."""
LOOK_EVERY: Final = 0.5
"""Seconds between looks at who has been silent."""
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
SILENT: Final = "silent"
"""Fate of a request that was not answered to its end: nothing more came for it."""
LOST: Final = "lost a chunk"
NO_RESPONDERS: Final = "no_responders"
_CODE: Final = re.compile(rb'"code":\s*"(\w+)"')
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


class Sent(msgspec.Struct, kw_only=True):
    """What became of one request that was sent at its moment.

    Attributes:
        due: When it was to be sent, in seconds after the first one.
        sent: When it was.
        moments: When its chunks came, by the same clock.
        fate: `ok`, or why not: an error's code, `no_responders`, `silent`, `lost a chunk`.
    """

    due: float
    sent: float = 0.0
    moments: list[float] = []
    fate: str = ""


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

    def paced(
        self, subject: str, bodies: Sequence[bytes], due: Sequence[float], *, silence: float = SILENCE
    ) -> list[Sent]:
        """Sends every request at its moment, and returns once each was answered or has been silent too long.

        Args:
            subject: Where to.
            bodies: One a request.
            due: When each is sent, in seconds from now, rising.
            silence: Seconds without a message after which a request is given up.
        """
        run = _Paced(f"{self._inbox}.{self._runs}".encode(), subject.encode(), bodies, due)
        self._runs += 1
        rest = b""
        while (wait := run.wait(silence)) is not None:
            self._socket.settimeout(wait)
            try:
                # Nothing came in time: then the next request is due, or one has been silent for too long.
                with contextlib.suppress(TimeoutError):
                    rest, _ = run.read(rest + self._block())
            finally:
                self._socket.settimeout(SILENCE)
            if run.pinged:
                self._socket.sendall(b"PONG\r\n")
                run.pinged = False
            if count := run.count_due():
                self._send(run, count)
        return run.all

    def _send(self, run: _Run, count: int) -> None:
        frames = run.next_frames(count)
        if frames:
            self._socket.sendall(frames)

    def _receive(self) -> bytes:
        try:
            return self._block()
        except TimeoutError:
            raise LoadFailed(f"nothing came for {SILENCE:g} s") from None

    def _block(self) -> bytes:
        block = self._socket.recv(BLOCK)
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
                self._end(words[1], data[eol + 2 : end], data[body:position], empty=int(words[-2]) == size)
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

    def _end(self, reply: bytes, block: bytes, before: bytes, *, empty: bool) -> None:
        status, count = _STATUS.search(block), _CHUNKS.search(block)
        if not empty or status is None or count is None or status[1] != b"ok":
            text = b"%b; the message before it: %b" % (block.strip(), before[:SHOWN].strip())
            raise LoadFailed(f"an answer ended with {text.decode(errors='replace')!r}")
        self.stated += int(count[1])


class _Paced(_Run):
    """Requests with a moment each. One that fails is an outcome here, and no reason to stop.

    Attributes:
        all: What became of each so far.
    """

    def __init__(self, inbox: bytes, subject: bytes, bodies: Sequence[bytes], due: Sequence[float]) -> None:
        self._times: dict[bytes, list[float]] = {}
        super().__init__(inbox, subject, bodies, self._times)
        self.all = [Sent(due=moment) for moment in due]
        self._started = time.perf_counter()
        self._open: dict[bytes, Sent] = {}
        self._looked = 0.0

    def wait(self, silence: float) -> float | None:
        """Seconds until something has to be done though nothing comes; None once all is over."""
        now = time.perf_counter() - self._started
        if now - self._looked > min(LOOK_EVERY, silence):
            self._looked = now
            for reply, request in list(self._open.items()):
                if now - (request.moments[-1] if request.moments else request.sent) > silence:
                    request.fate = SILENT
                    del self._open[reply]
        if self._sent < len(self.all):
            return max(1e-4, self.all[self._sent].due - now)
        return min(LOOK_EVERY, silence) if self._open else None

    def count_due(self) -> int:
        """Requests whose moment has come."""
        now, count = time.perf_counter() - self._started, 0
        while self._sent + count < len(self.all) and self.all[self._sent + count].due <= now:
            count += 1
        return count

    def next_frames(self, count: int) -> bytes:
        """The next requests; their clocks start now."""
        first = self._sent
        frames = super().next_frames(count)
        now = time.perf_counter() - self._started
        for number in range(first, self._sent):
            reply, request = b"%b.%d" % (self._inbox, number), self.all[number]
            request.sent = now
            self._open[reply] = request
        return frames

    def read(self, data: bytes) -> tuple[bytes, int]:
        """Takes the whole messages in `data`; what is left over, and how many answers ended."""
        found = super().read(data)
        for reply, times in self._times.items():
            if (request := self._open.get(reply)) is not None:
                request.moments += [moment - self._started for moment in times]
        self._times.clear()
        return found

    def _end(self, reply: bytes, block: bytes, before: bytes, *, empty: bool) -> None:
        request = self._open.pop(reply, None)
        if request is None:
            return
        request.moments += [moment - self._started for moment in self._times.pop(reply, [])]
        status, count = _STATUS.search(block), _CHUNKS.search(block)
        if b" 503" in block[: block.find(b"\r\n")]:
            request.fate = NO_RESPONDERS
        elif status is None or count is None:
            request.fate = "unreadable"
        elif status[1] == b"ok":
            request.fate = "ok" if int(count[1]) == len(request.moments) else LOST
        else:
            code = _CODE.search(before)
            request.fate = (code[1] if code else status[1]).decode()


def encode(body: dict[str, Any]) -> bytes:
    """A request's body."""
    return msgspec.json.encode(body)
