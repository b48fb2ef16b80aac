"""One wildcard subscription for all answers: the last token of the subject names the inbox.

It is cheaper than a subscription for each request, and made before the first
request, so that no answer is missed.
"""

from __future__ import annotations

import itertools
import secrets

from inferbus.workers.bus.connection.message import Callback, Message


class Inbox:
    """A place for answers; `subject` is what to put into a message's reply field."""

    def __init__(self, inboxes: Inboxes, subject: str) -> None:
        self._inboxes = inboxes
        self.subject = subject

    def close(self) -> None:
        """Later answers are dropped."""
        self._inboxes.forget(self.subject)


class Inboxes:
    """The inboxes of one connection.

    Attributes:
        late: Messages for closed inboxes.
    """

    def __init__(self, prefix: str) -> None:
        self.prefix = prefix
        self.base = f"{prefix}.{secrets.token_hex(11)}"
        self._numbers = itertools.count(1)
        self._callbacks: dict[str, Callback] = {}
        self.late = 0

    @property
    def filter(self) -> str:
        """What to subscribe to."""
        return f"{self.base}.*"

    def __len__(self) -> int:
        return len(self._callbacks)

    def open(self, callback: Callback) -> Inbox:
        """A new inbox; `callback` gets its messages until it is closed."""
        subject = f"{self.base}.{next(self._numbers):x}"
        self._callbacks[subject] = callback
        return Inbox(self, subject)

    def forget(self, subject: str) -> None:
        """Closes an inbox; harmless when it is closed."""
        self._callbacks.pop(subject, None)

    def dispatch(self, message: Message) -> None:
        """Gives a message to its inbox; counts those for closed ones."""
        callback = self._callbacks.get(message.subject)
        if callback is None:
            self.late += 1
        else:
            callback(message)
