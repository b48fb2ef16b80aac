"""Fuzzes the connection: a server that says anything, in any pieces, and then something sound.

Whatever came before, the connection must not end in an exception, stay "connected" and deaf, or give a
message to another subscription than its own.
"""

from __future__ import annotations

import random
from collections.abc import Coroutine
from typing import Any

from nats.errors import ProtocolError

from inferbus.workers.bus.connection.login import Login
from inferbus.workers.bus.connection.message import Callback, Message
from inferbus.workers.bus.connection.natspy import GuardedClient
from inferbus.workers.bus.connection.protocol import Parser
from inferbus.workers.config import BusSettings

CORPUS: list[bytes] = [
    b"MSG a.b 1 5\r\nhello\r\n",
    b"MSG a.b 1 _INBOX.x.1 0\r\n\r\n",
    b"MSG a.\xff 1 2\r\n{}\r\n",
    b"MSG a.x\x0b2 1 2\r\n{}\r\n",
    b"MSG a.b 2 11\r\nMSG c 1 0\r\n\r\n",
    b"HMSG a.b 1 12 14\r\nNATS/1.0\r\n\r\n{}\r\n",
    b"HMSG a.b 1 r 23 25\r\nNATS/1.0\r\nA: b\r\nC:d\r\n\r\n{}\r\n",
    b"HMSG a.b 1 16 16\r\nNATS/1.0 503\r\n\r\n\r\n",
    b"HMSG a.b 1 31 31\r\nNATS/1.0 100 Idle Heartbeat\r\n\r\n\r\n",
    b"HMSG a.b 1 8 8\r\nNATS/1.0\r\n",
    b"HMSG a.b 1 12 12\r\nNATS/1.0 \xff\xff\xff\r\n",
    b"HMSG a.b 1 0 0\r\n\r\n",
    b"PING\r\nPONG\r\n+OK\r\n",
    b"-ERR 'Permissions Violation for Publish to \"a\"'\r\n",
    b"-ERR\r\n",
    b'INFO {"server_id":"x","max_payload":1048576,"connect_urls":["127.0.0.1:4222"]}\r\n',
    b"INFO {\r\n",
    b'INFO {"connect_urls":[1,null]}\r\n',
]
"""Sound and unsound commands, to be changed and joined."""

_WORDS = (
    b"\r\n",
    b" ",
    b"\x0b",
    b"\t",
    b"\xff",
    b"\x00",
    b"MSG ",
    b"HMSG ",
    b"NATS/1.0",
    b"1",
    b"2",
    b"999999",
)

_AFTERWARDS = b"MSG known 1 4\r\ngood\r\n"


class _Client(GuardedClient):
    """The guarded client behind the socket, with what it would do to it left out."""

    def __init__(self) -> None:
        super().__init__(Login(BusSettings()))
        self.got: list[tuple[int, Message]] = []
        self.lost = 0

    def direct(self, number: int) -> Callback:
        return lambda message: self.got.append((number, message))

    async def _process_ping(self) -> None:
        pass

    async def _process_info(self, info: dict[str, Any], initial_connection: bool = False) -> None:
        for url in info.get("connect_urls") or []:
            url.encode()

    async def _process_err(self, err_msg: str) -> None:
        # Lost, as far as the parser is concerned, unless it is about permissions.
        if "permissions violation" not in err_msg:
            self.lost += 1
            self._ps.reset()


def mutated(random: random.Random) -> bytes:
    """Some commands of the corpus in a row, with bytes changed, taken out, put in and repeated."""
    data = bytearray(b"".join(random.choices(CORPUS, k=random.randint(1, 4))))
    for _ in range(random.randint(0, 5)):
        at = random.randrange(len(data) + 1)
        match random.randrange(4):
            case 0:
                data[at:at] = random.choice(_WORDS)
            case 1:
                del data[at : at + random.randint(1, 8)]
            case 2 if at < len(data):
                data[at] = random.randrange(256)
            case _:
                data[at:at] = data[at : at + random.randint(1, 12)]
    return bytes(data)


def run(data: bytes) -> None:
    """Feeds one input in random pieces, and whole; both must come to the same."""
    cuts = random.Random(len(data) * 31 + sum(data))  # the same for the same input
    pieces, whole = _result(_fed(data, cuts)), _result(_fed(data, None))
    assert pieces == whole, (pieces, whole)


def _result(feeding: Coroutine[Any, Any, list[Any]]) -> list[Any]:
    """Of a coroutine that waits for nothing, so that it needs no event loop."""
    try:
        feeding.send(None)
    except StopIteration as end:
        return list(end.value)
    raise AssertionError("the parser waited for something")


async def _fed(data: bytes, cuts: random.Random | None) -> list[Any]:
    client = _Client()
    parser: Parser = client._ps
    rest, broken = data, False
    while rest and not (broken or client.lost):
        size = len(rest) if cuts is None else cuts.choice((1, 1, 2, 3, 7, len(rest)))
        piece, rest = rest[:size], rest[size:]
        try:
            await parser.parse(piece)
        except ProtocolError:
            # The connection is made again, with nothing of the old one.
            broken = True
    for _, message in client.got:
        if message.undecodable is None:
            assert message.subject.isprintable()
            assert message.reply.isprintable()
        else:
            assert message.subject.isascii() or message.subject.isprintable()
    if broken or client.lost:
        parser.reset()
    elif parser.waiting:
        # The rest of a message is to come: an idle server's PONG does not end the wait, the watchdog does.
        return [*_told(client), "waiting"]
    count = len(client.got)
    await parser.parse(_AFTERWARDS)
    assert [(sid, each.subject, each.data) for sid, each in client.got[count:]] == [(1, "known", b"good")]
    return _told(client)


def _told(client: _Client) -> list[Any]:
    return [(sid, m.subject, m.reply, m.data, m.headers, m.undecodable) for sid, m in client.got]
