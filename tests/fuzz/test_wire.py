"""The connection, fed with anything."""

from __future__ import annotations

import asyncio
import os
import random

import pytest

from inferbus.workers.bus.connection.bus import Bus
from inferbus.workers.bus.connection.message import Message
from inferbus.workers.config import BusSettings
from tests.fuzz import wire
from tests.support.eventually import eventually

RUNS = int(os.environ.get("FUZZ_RUNS", "2000"))

CONNECTIONS = min(RUNS // 100, 60)
"""Each costs a reconnection."""

INFO = b'INFO {"server_id":"x","version":"2.14.0","headers":true,"max_payload":1048576}\r\n'


@pytest.mark.parametrize("data", wire.CORPUS)
def test_what_is_known_to_be_hard_is_read_the_same_in_pieces_and_whole(data: bytes) -> None:
    wire.run(data)


def test_bytes_of_any_kind_leave_a_connection_that_reads_on_or_is_made_again() -> None:
    source = random.Random(int(os.environ.get("FUZZ_SEED", "1")))
    for _ in range(RUNS):
        data = wire.mutated(source)
        try:
            wire.run(data)
        except Exception as error:
            raise AssertionError(f"input: {data!r}") from error


async def test_a_server_that_says_anything_leaves_no_deaf_connection() -> None:
    """A whole `Bus` on a socket: it hears the next sound message, over this connection or a new one."""
    source = random.Random(2)
    connections = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        garbage = wire.mutated(source) if connections <= CONNECTIONS else b""
        # After an error of the server a client closes for good, and says so.
        garbage = garbage.replace(b"-ERR", b"+OK")
        writer.write(INFO)
        try:
            while line := await reader.readline():
                if line.startswith(b"PING"):
                    writer.write(b"PONG\r\n")
                elif line.startswith(b"SUB known"):
                    writer.write(garbage)
                    sid = line.split()[-1]
                    writer.write(b"MSG known %b 4\r\ngood\r\n" % sid)
                    if garbage:
                        # The connection does not outlive what was said, at the latest now.
                        await writer.drain()
                        writer.close()
        except OSError:
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    bus = await Bus.connect(BusSettings(urls=(f"nats://127.0.0.1:{port}",)), name="test", watchdog=0.2)
    got: list[Message] = []
    other: list[Message] = []
    await bus._subscriptions.open("other", "", other.append)
    await bus._subscriptions.open("known", "", got.append)
    await eventually(lambda: got and bus.connected and connections > CONNECTIONS, within=100)
    assert not bus.closed.is_set()
    assert bus.callback_errors == 0
    await bus.close()
    server.close()
    await server.wait_closed()
