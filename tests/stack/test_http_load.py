"""The benchmarks' load over HTTP counts what a server sends, and takes no answer for whole that is not."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator

import pytest

from benchmarks.http_load import CUT, Http
from benchmarks.load import SILENT, LoadFailed, Sent

WHOLE = re.compile(rb'"tokens": *3\b')
EVENTS = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
END = b"0\r\n\r\n"


def chunk(text: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(text), text)


def event(count: int) -> bytes:
    return b'data: {"tokens":%d}\n\n' % count


DONE = chunk(b"data: [DONE]\n\n")
ANSWERS = {
    b"/stream": [EVENTS, *(chunk(event(k)) for k in (1, 2, 3)), DONE + END],
    # Two events in a chunk, one event in two chunks, and a chunk in pieces.
    b"/torn": [EVENTS[:20], EVENTS[20:], chunk(event(1) + event(2)), chunk(event(3)[:9]), b"9\r\n", DONE],
    b"/short": [EVENTS, chunk(event(1)), chunk(event(2)), DONE + END],
    b"/unfinished": [EVENTS, chunk(event(3)), END],
    b"/plain": [b'HTTP/1.1 200 OK\r\nContent-Length: 12\r\n\r\n{"tokens": ', b"3"],
    b"/busy": [b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 4\r\n\r\nbusy"],
    b"/cut": [EVENTS, chunk(event(1)), b""],
    b"/silent": [EVENTS, chunk(event(1))],
}
TORN = chunk(event(3)[9:])
ANSWERS[b"/torn"][4:] = [TORN[:5], TORN[5:], DONE, END]


class Server:
    """Sends the answers above, piece by piece.

    Attributes:
        connections: That were made.
        served: Requests.
    """

    def __init__(self) -> None:
        self.connections = 0
        self.served = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                length = re.search(rb"Content-Length: (\d+)", head)
                assert length is not None
                await reader.readexactly(int(length[1]))
                self.served += 1
                for piece in ANSWERS[head.split(b" ")[1]]:
                    if not piece:
                        return
                    writer.write(piece)
                    await writer.drain()
                    # A turn of the loop each, so that pieces come apart.
                    await asyncio.sleep(0.001)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()


@pytest.fixture
async def server() -> AsyncIterator[tuple[Server, Http]]:
    served = Server()
    listener = await asyncio.start_server(served.serve, "127.0.0.1", 0)
    yield served, Http("127.0.0.1", listener.sockets[0].getsockname()[1])
    listener.close()


@pytest.mark.parametrize("path", ["/stream", "/torn"])
async def test_every_event_is_counted_and_connections_are_used_again(
    server: tuple[Server, Http], path: str
) -> None:
    served, http = server
    moments: list[list[float]] = []
    tally = await asyncio.to_thread(http.run, path, [b"{}"] * 6, concurrency=2, whole=WHOLE, moments=moments)
    assert tally.chunks == 18
    assert len(tally.first) == 6
    assert [len(times) for times in moments] == [3] * 6
    assert (served.connections, served.served) == (2, 6)


async def test_an_answer_without_events_is_read_by_its_length(server: tuple[Server, Http]) -> None:
    moments: list[list[float]] = []
    tally = await asyncio.to_thread(
        server[1].run, "/plain", [b"{}"] * 3, concurrency=3, whole=WHOLE, moments=moments
    )
    assert (tally.chunks, moments) == (0, [[], [], []])


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("/short", "ended with"),
        ("/unfinished", "ended with"),
        ("/busy", "http 503: .*busy"),
        ("/cut", "closed"),
    ],
)
async def test_an_answer_that_is_not_whole_fails_the_reading(
    server: tuple[Server, Http], path: str, says: str
) -> None:
    with pytest.raises(LoadFailed, match=says):
        await asyncio.to_thread(server[1].run, path, [b"{}"], concurrency=1, whole=WHOLE, moments=[])


@pytest.mark.parametrize(
    ("path", "fate", "events"),
    [
        ("/stream", "ok", 3),
        ("/short", "not whole", 2),
        ("/busy", "http 503", 0),
        ("/cut", CUT, 1),
        ("/silent", SILENT, 1),
    ],
)
async def test_paced_requests_are_told_apart_by_what_became_of_them(
    server: tuple[Server, Http], path: str, fate: str, events: int
) -> None:
    sent: list[Sent] = await asyncio.to_thread(
        server[1].paced, path, [b"{}"] * 3, [0.0, 0.0, 0.1], whole=WHOLE, silence=0.5
    )
    assert [(each.fate, len(each.moments)) for each in sent] == [(fate, events)] * 3
    assert all(each.sent >= each.due for each in sent)
