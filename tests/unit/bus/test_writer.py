"""The writer's barriers: everybody who waits for what was written is told, whenever he began to wait."""

from __future__ import annotations

import asyncio

from inferbus.workers.bus.connection.writer import Writer
from tests.support.eventually import eventually


class _SlowClient:
    """A client whose socket takes its time."""

    max_payload = 1024 * 1024
    is_connected = True
    is_closed = False

    def __init__(self) -> None:
        self.goes_on = asyncio.Event()
        self.flushing = False
        self.written = b""

    async def _send_command(self, frames: bytes) -> None:
        self.written += frames

    async def _flush_pending(self, *, force_flush: bool = False) -> None:
        if force_flush:
            self.flushing = True
            await self.goes_on.wait()


async def test_whoever_begins_to_wait_while_another_is_being_told_is_told_too() -> None:
    client = _SlowClient()
    writer = Writer(client)
    writer.set_connected(True)
    writer.start()
    writer.put("a", b"1", None, "")
    first = writer.written()
    await eventually(lambda: client.flushing)
    second = writer.written()
    client.goes_on.set()
    async with asyncio.timeout(5):
        await asyncio.gather(first, second)
    assert client.written == b"PUB a 1\r\n1\r\n"
    await writer.close(1.0)
