"""A message from NATS, without a type of nats-py in it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Final

import msgspec

NO_HEADERS: Final[Mapping[str, str]] = MappingProxyType({})

STATUS: Final = "Status"
NO_RESPONDERS: Final = "503"


class Message(msgspec.Struct, frozen=True):
    """One message.

    Attributes:
        subject: Its subject.
        data: Its body.
        headers: Its headers; empty where it has none.
        reply: Where an answer goes; empty where none is wanted.
    """

    subject: str
    data: bytes
    headers: Mapping[str, str] = NO_HEADERS
    reply: str = ""

    @property
    def forwarded(self) -> bool:
        """Whether the server sent it on somebody's behalf: a stored message, or a status line."""
        return "Nats-Stream" in self.headers or bool(self.status)

    @property
    def status(self) -> str:
        """The server's inline status (`503`, `404`, …), empty for an ordinary message."""
        return self.headers.get(STATUS, "") if not self.data else ""


Callback = Callable[[Message], None]
"""Must be quick: messages of one subscription come one after the other. Start a task for more."""
