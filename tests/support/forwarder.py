"""An address that stays the same while what is behind it is replaced, as a Kubernetes service's does."""

from __future__ import annotations

import asyncio
from contextlib import suppress


class Forwarder:
    """Takes TCP connections at one address and forwards them to another of the same port.

    Args:
        host: Where it listens.
        port: Here and there.
    """

    def __init__(self, host: str, port: int) -> None:
        self.host = host
        self.port = port
        self._target = ""
        self._server: asyncio.Server | None = None
        self._open: set[asyncio.StreamWriter] = set()

    async def lead_to(self, target: str) -> None:
        """Forwards to this host from now on; connections to another end."""
        self._target = target
        self._hang_up()
        if self._server is None:
            self._server = await asyncio.start_server(self._forward, self.host, self.port)

    async def close(self) -> None:
        """Nothing listens at the address any more."""
        self._hang_up()
        if self._server is not None:
            server, self._server = self._server, None
            server.close()
            await server.wait_closed()

    def _hang_up(self) -> None:
        for writer in self._open:
            writer.transport.abort()

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            there = await asyncio.open_connection(self._target, self.port)
        except OSError:
            writer.transport.abort()
            return
        ends = (writer, there[1])
        self._open.update(ends)
        try:
            await asyncio.gather(_copy(reader, there[1]), _copy(there[0], writer))
        finally:
            self._open.difference_update(ends)
            for end in ends:
                end.transport.abort()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(ConnectionError):
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
        writer.write_eof()
