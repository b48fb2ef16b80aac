"""What can go wrong with NATS, as more than `BusUnavailable` says.

    BusUnavailable
    ├── NoResponders     nobody listens on that subject (status 503)
    ├── NotPermitted     the server refused a subject to this user
    ├── ApiError         JetStream said no; carries its error code
    └── ProvisionError   a stream is there with settings that are weaker than asked for

All of them are infrastructure errors to the delivery contract, which looks no
further than `BusUnavailable`.
"""

from __future__ import annotations

from typing import Final

from inferbus.schemas.errors import BusUnavailable

WRONG_LAST_SEQUENCE: Final = frozenset({10071, 10164})
"""The subject already holds a message that the publisher did not expect."""

NOT_FOUND: Final = 404
STREAM_NOT_FOUND: Final = 10059
CONSUMER_NOT_FOUND: Final = 10014
JETSTREAM_OFF: Final = frozenset({10039, 10076})
"""Not enabled for this account; not enabled at all."""

STORE_FAILED: Final = 10077
"""The stream took nothing; with `discard: new`, because a limit is reached (trial A20)."""

FULL: Final = frozenset({10002, 10023, 10028, 10047, STORE_FAILED})
"""The account, the server, its memory, its disk or the stream has no room; another try will not help."""


class NoResponders(BusUnavailable):
    """Nobody listens on that subject."""


class NotPermitted(BusUnavailable):
    """The server refused a subject to this user."""


class ApiError(BusUnavailable):
    """JetStream refused.

    Attributes:
        status: HTTP-like, 404 for example.
        err_code: JetStream's own number.
    """

    def __init__(self, message: str, *, status: int = 500, err_code: int = 0) -> None:
        super().__init__(message)
        self.status = status
        self.err_code = err_code


class ProvisionError(BusUnavailable):
    """A stream or consumer is there, but weaker than asked for; nothing was changed."""
