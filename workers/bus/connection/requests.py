"""Requests that wait for their answer."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from inferbus.workers.bus.connection.inbox import Inboxes
from inferbus.workers.bus.connection.message import Message
from inferbus.workers.bus.errors import NotPermitted


class Requests:
    """The open requests of one connection, by subject, so that a refusal ends those that it is about."""

    def __init__(self, inboxes: Inboxes) -> None:
        self._inboxes = inboxes
        self._waiting: dict[str, set[asyncio.Future[Message]]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))

    @contextmanager
    def open(self, subject: str) -> Iterator[tuple[str, asyncio.Future[Message]]]:
        """A reply subject, and the first answer that comes there."""
        answer: asyncio.Future[Message] = asyncio.get_running_loop().create_future()

        def on_message(message: Message) -> None:
            if not answer.done():
                answer.set_result(message)

        key = subject.lower()
        self._waiting.setdefault(key, set()).add(answer)
        inbox = self._inboxes.open(on_message)
        try:
            yield inbox.subject, answer
        finally:
            inbox.close()
            self._waiting[key].discard(answer)
            if not self._waiting[key]:
                del self._waiting[key]

    def refuse(self, subject: str) -> None:
        """Ends the requests on a subject that this user may not publish to; case is ignored."""
        for answer in self._waiting.get(subject.lower(), ()):
            if not answer.done():
                answer.set_exception(NotPermitted(f"not permitted to publish to {subject}"))
