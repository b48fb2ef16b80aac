"""A message from NATS, without a type of nats-py in it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Final

import msgspec

NO_HEADERS: Final[Mapping[str, str]] = MappingProxyType({})

NO_RESPONDERS: Final = "503"
STREAM: Final = "Nats-Stream"
"""Added by the server to a message that it takes from a stream for somebody."""
SEQUENCE: Final = "Nats-Sequence"


class Message(msgspec.Struct, frozen=True):
    """One message.

    Attributes:
        subject: Its subject; escaped where it is no text.
        data: Its body.
        headers: Its headers; empty where it has none.
        reply: Where an answer goes; empty where none is wanted.
        status_line: The number in its header block's first line, empty for an ordinary message. The server
            writes it, but anybody can.
        description: The text behind that number.
        repeated: Names of headers that occur more than once.
        undecodable: The header block as received, where it or the subject is no text. Only subscriptions
            that ask for such messages get them.
    """

    subject: str
    data: bytes
    headers: Mapping[str, str] = NO_HEADERS
    reply: str = ""
    status_line: str = ""
    description: str = ""
    repeated: tuple[str, ...] = ()
    undecodable: bytes | None = None

    @property
    def status(self) -> str:
        """The server's status (`503`, `404`, …); empty for other messages, those out of a stream included."""
        return "" if self.data or SEQUENCE in self.headers else self.status_line

    @property
    def forwarded(self) -> bool:
        """Whether the server sent it on somebody's behalf, to the reply subject of another message.

        Such a message is never a request, a job, a cancel mark or an announcement. Answers to one's own
        questions are forwarded.
        """
        return bool(self.status_line) or STREAM in self.headers


Callback = Callable[[Message], None]
"""Must be quick: messages of one subscription come one after the other. Start a task for more."""
