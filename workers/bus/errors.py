"""The kinds of `BusUnavailable`.

    BusUnavailable
    ├── NoResponders        nobody listens on that subject (status 503)
    ├── NotPermitted        the server refused a subject to this user
    ├── ApiError            JetStream refused; carries its error code
    │   └── StreamFull      there is no room
    │       └── SubjectFull there is no room on that subject
    └── ProvisionError      a stream is there with settings that are weaker than asked for

All of them are infrastructure errors to the delivery contract, which catches
`BusUnavailable` only.
"""

from __future__ import annotations

from typing import Final

from inferbus.schemas.errors import BusUnavailable

WRONG_LAST_SEQUENCE: Final = frozenset({10071, 10164})
"""The subject already holds a message that the publisher did not expect."""

NOT_FOUND: Final = 404
"""The status of the three codes that follow."""
MESSAGE_NOT_FOUND: Final = 10037
STREAM_NOT_FOUND: Final = 10059
CONSUMER_NOT_FOUND: Final = 10014
JETSTREAM_OFF: Final = frozenset({10039, 10076})
"""Not enabled for this account; not enabled at all."""

STORE_FAILED: Final = 10077
"""The stream stored nothing; with `discard: new`, because a limit is reached."""

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
        description: The server's text.
    """

    def __init__(self, message: str, *, status: int = 500, err_code: int = 0, description: str = "") -> None:
        super().__init__(message)
        self.status = status
        self.err_code = err_code
        self.description = description


class StreamFull(ApiError):
    """A limit of the stream, the account or the server is reached; another try will not help."""


class SubjectFull(StreamFull):
    """The stream holds as many messages of that subject as it may."""


class ProvisionError(BusUnavailable):
    """A stream or consumer is there, but weaker than asked for; nothing was changed."""
