"""A bare socket that speaks NATS, and may say anything in it."""

from __future__ import annotations

import asyncio
import json
from typing import Any


class RawClient:
    """A client whose subjects and header blocks are sent as they are."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Not to be called; see `connect`."""
        self._reader = reader
        self._writer = writer

    @classmethod
    async def connect(cls, port: int, **login: str) -> RawClient:
        """Connects to a server on this host."""
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        await reader.readline()
        options: dict[str, Any] = {"verbose": False, "headers": True, "no_responders": True} | login
        writer.write(b"CONNECT " + json.dumps(options).encode() + b"\r\n")
        client = cls(reader, writer)
        await client.flush()
        return client

    async def publish(
        self, subject: bytes, data: bytes = b"", *, reply: bytes = b"", block: bytes | None = None
    ) -> None:
        """Publishes; on return the server has it."""
        target = b"%b %b" % (subject, reply) if reply else subject
        if block is None:
            self._writer.write(b"PUB %b %d\r\n%b\r\n" % (target, len(data), data))
        else:
            sizes = len(block), len(block) + len(data)
            self._writer.write(b"HPUB %b %d %d\r\n%b%b\r\n" % (target, *sizes, block, data))
        await self.flush()

    async def flush(self) -> None:
        """Returns when the server has everything; errors that it reports are raised."""
        self._writer.write(b"PING\r\n")
        while (line := await asyncio.wait_for(self._reader.readline(), 5)) != b"PONG\r\n":
            if not line or line.startswith(b"-ERR"):
                raise ConnectionError(line)

    async def close(self) -> None:
        """Ends the connection."""
        self._writer.close()
        await self._writer.wait_closed()
