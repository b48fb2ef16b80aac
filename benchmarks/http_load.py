"""A load generator for HTTP that costs little: bare sockets, one selector, one thread.

It reads just enough of HTTP/1.1 to count the server-sent events of an answer, take their times, and check
that each answer has ended well: status 200, `[DONE]` where there are events, and the mark of a whole answer.
Connections stay and are used again. It is to HTTP what `benchmarks.load.Wire` is to NATS.
"""

from __future__ import annotations

import contextlib
import re
import selectors
import socket
import time
from collections.abc import Iterator, Sequence
from typing import Final

from benchmarks.load import LOOK_EVERY, SHOWN, SILENCE, SILENT, LoadFailed, Sent, Tally

IDLE: Final = 2.0
"""Seconds after which a connection is not used again: servers close what is idle, 5 s in uvicorn."""
BLOCK: Final = 16 * 1024
"""Some events of one answer; the memory for a block that is read is taken anew each time."""
CUT: Final = "cut"
"""Fate of a request whose connection was closed before its answer's end."""
_STATUS: Final = re.compile(rb"HTTP/1\.\d (\d{3})")
_LENGTH: Final = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
_CHUNKED: Final = re.compile(rb"\r\ntransfer-encoding: *chunked", re.IGNORECASE)
_EVENTS: Final = re.compile(rb"\r\ncontent-type: *text/event-stream", re.IGNORECASE)
_CLOSE: Final = re.compile(rb"\r\nconnection: *close", re.IGNORECASE)
_DONE: Final = b"data: [DONE]"


class Answer:
    """One answer as it comes.

    Attributes:
        number: Of the request.
        sent: When it was sent.
        status: Of the answer; 0 before it came.
        over: Whether all of it is here.
        reusable: Whether the connection may be used again.
    """

    def __init__(self, number: int, sent: float) -> None:
        self.number = number
        self.sent = sent
        self.status = 0
        self.over = False
        self.reusable = True
        self._rest = b""
        self._left: int | None = None
        self._events = False
        self._done = False
        self._part = b""
        self._last = [b"", b""]

    def feed(self, data: bytes) -> int:
        """Takes what came; how many events ended in it, `[DONE]` not counted."""
        if self._rest:
            data = self._rest + data
        at = 0
        if not self.status:
            end = data.find(b"\r\n\r\n")
            if end < 0:
                self._rest = data
                return 0
            self._head(data[:end])
            at = end + 4
        if self._left is not None:
            piece = data[at:]
            self._left -= len(piece)
            self.over, self._rest = self._left <= 0, b""
            return self._body(piece)
        events = 0
        while (eol := data.find(b"\r\n", at)) >= 0:
            size = int(data[at:eol].partition(b";")[0], 16)
            end = eol + 4 + size
            if end > len(data):
                break
            if size == 0:
                self.over = True
            else:
                events += self._body(data[eol + 2 : end - 2])
            at = end
        self._rest = data[at:]
        return events

    def fault(self, whole: re.Pattern[bytes]) -> str:
        """What is wrong with it; nothing, if it has ended well.

        Args:
            whole: Is in the last two events of a whole answer, or in its body.
        """
        end = b" ".join([*self._last, self._part])
        if self.status != 200:
            return f"http {self.status}: {end[-SHOWN:].decode(errors='replace')}"
        if (self._events and not self._done) or not whole.search(end):
            return f"ended with {end[-SHOWN:].decode(errors='replace')!r}"
        return ""

    def _head(self, head: bytes) -> None:
        status, length = _STATUS.match(head), _LENGTH.search(head)
        if status is None or (length is None and not _CHUNKED.search(head)):
            raise LoadFailed(f"no HTTP answer: {head[:SHOWN].decode(errors='replace')!r}")
        self.status = int(status[1])
        self._left = int(length[1]) if length else None
        self._events = bool(_EVENTS.search(head))
        self.reusable = not _CLOSE.search(head)

    def _body(self, piece: bytes) -> int:
        self._part += piece
        if not self._events:
            return 0
        *events, self._part = self._part.split(b"\n\n")
        count = 0
        for event in events:
            if event == _DONE:
                self._done = True
            else:
                count += 1
                self._last = [self._last[1], event]
        return count


class Http:
    """A server.

    Args:
        host: Of it.
        port: Of it.
    """

    def __init__(self, host: str, port: int) -> None:
        self._host = host
        self._port = port

    def run(
        self,
        path: str,
        bodies: Sequence[bytes],
        *,
        concurrency: int,
        whole: re.Pattern[bytes],
        moments: list[list[float]],
    ) -> Tally:
        """Posts every request, some at a time, and returns once all are answered.

        Args:
            path: Where to.
            bodies: One a request.
            concurrency: Requests that are open at a time; the next is sent when one has ended.
            whole: See `Answer.fault`.
            moments: Takes the times of every answer's events.

        Raises:
            LoadFailed: An answer was an error, was not whole, or did not come.
        """
        requests = self._requests(path, bodies)
        moments += ([] for _ in bodies)
        tally, ended = Tally(), 0
        with _Connections(self._host, self._port) as connections:
            cpu, started = time.thread_time(), time.perf_counter()
            left = iter(range(len(requests)))
            # In this order: `zip` would take one more of `left` to find out that it has enough.
            for _, number in zip(range(concurrency), left, strict=False):
                connections.post(Answer(number, time.perf_counter()), requests[number])
            heard = started
            while ended < len(requests):
                blocks = connections.read(SILENCE)
                now = time.perf_counter()
                if blocks:
                    heard = now
                elif now - heard >= SILENCE:
                    raise LoadFailed(f"nothing came for {SILENCE:g} s")
                for connection, answer, block in blocks:
                    if not block:
                        raise LoadFailed(f"a connection was closed {now - answer.sent:.1f} s after a request")
                    times, count = moments[answer.number], answer.feed(block)
                    if count:
                        if not times:
                            tally.first.append(now - answer.sent)
                        tally.chunks += count
                        times += [now] * count
                    tally.bytes += len(block)
                    if answer.over:
                        if fault := answer.fault(whole):
                            raise LoadFailed(fault)
                        ended += 1
                        connections.ended(connection, answer)
                        if (number := next(left, -1)) >= 0:
                            connections.post(Answer(number, time.perf_counter()), requests[number])
            tally.seconds = time.perf_counter() - started
            tally.cpu = time.thread_time() - cpu
        return tally

    def paced(
        self,
        path: str,
        bodies: Sequence[bytes],
        due: Sequence[float],
        *,
        whole: re.Pattern[bytes],
        silence: float = SILENCE,
    ) -> list[Sent]:
        """Posts every request at its moment, and returns once each was answered or has been silent too long.

        Args:
            path: Where to.
            bodies: One a request.
            due: When each is sent, in seconds from now, rising.
            whole: See `Answer.fault`.
            silence: Seconds without an event after which a request is given up.
        """
        requests = self._requests(path, bodies)
        sent = [Sent(due=moment) for moment in due]
        waiting: dict[int, socket.socket] = {}
        begun, looked = 0, 0.0
        with _Connections(self._host, self._port) as connections:
            started = time.perf_counter()
            while begun < len(sent) or waiting:
                now = time.perf_counter() - started
                while begun < len(sent) and sent[begun].due <= now:
                    sent[begun].sent = time.perf_counter() - started
                    answer = Answer(begun, started + sent[begun].sent)
                    waiting[begun] = connections.post(answer, requests[begun])
                    begun += 1
                wait = max(0.0, sent[begun].due - now) if begun < len(sent) else LOOK_EVERY
                blocks = connections.read(min(wait, LOOK_EVERY))
                now = time.perf_counter() - started
                for connection, answer, block in blocks:
                    request = sent[answer.number]
                    request.moments += [now] * answer.feed(block)
                    if answer.over or not block:
                        del waiting[answer.number]
                        request.fate = _fate(answer, whole)
                        connections.ended(connection, answer)
                if now - looked > min(LOOK_EVERY, silence):
                    looked = now
                    for number, connection in list(waiting.items()):
                        if now - max([sent[number].sent, *sent[number].moments[-1:]]) > silence:
                            sent[number].fate = SILENT
                            del waiting[number]
                            connections.drop(connection)
        return sent

    def _requests(self, path: str, bodies: Sequence[bytes]) -> list[bytes]:
        head = (
            f"POST {path} HTTP/1.1\r\nHost: {self._host}:{self._port}\r\nContent-Type: application/json\r\n"
        )
        return [b"%bContent-Length: %d\r\n\r\n%b" % (head.encode(), len(body), body) for body in bodies]


def _fate(answer: Answer, whole: re.Pattern[bytes]) -> str:
    if not answer.over:
        return CUT
    if answer.status != 200:
        return f"http {answer.status}"
    return "not whole" if answer.fault(whole) else "ok"


class _Connections:
    """All connections to the server, the idle ones among them."""

    def __init__(self, host: str, port: int) -> None:
        self._address = (host, port)
        self._selector = selectors.DefaultSelector()
        self._idle: dict[socket.socket, float] = {}

    def __enter__(self) -> _Connections:
        return self

    def __exit__(self, *_: object) -> None:
        for key in list(self._selector.get_map().values()):
            self.drop(key.fileobj)  # type: ignore[arg-type]
        self._selector.close()

    def post(self, answer: Answer, request: bytes) -> socket.socket:
        """Sends a request on an idle connection, or a new one."""
        connection = self._take()
        self._selector.modify(connection, selectors.EVENT_READ, answer)
        connection.sendall(request)
        return connection

    def read(self, wait: float) -> list[tuple[socket.socket, Answer, bytes]]:
        """What came on connections in use; nothing after `wait` seconds without anything."""
        return [block for key, _ in self._selector.select(wait) for block in self._received(key)]

    def ended(self, connection: socket.socket, answer: Answer) -> None:
        """Keeps a connection for the next request."""
        if not (answer.over and answer.reusable):
            self.drop(connection)
            return
        self._selector.modify(connection, selectors.EVENT_READ, None)
        self._idle[connection] = time.monotonic()

    def drop(self, connection: socket.socket) -> None:
        """Closes a connection."""
        self._idle.pop(connection, None)
        self._selector.unregister(connection)
        connection.close()

    def _take(self) -> socket.socket:
        while self._idle:
            connection, since = self._idle.popitem()
            if time.monotonic() - since < IDLE:
                return connection
            self.drop(connection)
        # It blocks: sockets with a timeout ask the kernel twice for every block that is read.
        connection = socket.create_connection(self._address, timeout=SILENCE)
        connection.settimeout(None)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._selector.register(connection, selectors.EVENT_READ, None)
        return connection

    def _received(self, key: selectors.SelectorKey) -> Iterator[tuple[socket.socket, Answer, bytes]]:
        connection: socket.socket = key.fileobj  # type: ignore[assignment]
        block = b""
        with contextlib.suppress(ConnectionError):
            block = connection.recv(BLOCK)
        if key.data is not None:
            yield connection, key.data, block
        elif not block:
            self.drop(connection)
