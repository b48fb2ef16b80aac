"""A way to a server that can be cut, and mended."""

from __future__ import annotations

from inferbus.workers.stack.server import NatsServer
from tests.support.forwarder import Forwarder


class Line:
    """A forwarder in front of one server.

    Attributes:
        url: Of the server, over this line.
    """

    def __init__(self, server: NatsServer) -> None:
        self._forwarder = Forwarder("127.0.0.2", server.port)
        self.url = f"nats://{self._forwarder.host}:{server.port}"

    async def mend(self) -> None:
        """Connections can be made."""
        await self._forwarder.lead_to("127.0.0.1")

    async def cut(self) -> None:
        """Ends all connections; none can be made."""
        await self._forwarder.close()
