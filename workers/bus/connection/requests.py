"""Requests that wait for their answer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from inferbus.workers.bus.connection.inbox import Inboxes
from inferbus.workers.bus.connection.message import Callback, Message
from inferbus.workers.bus.errors import NotPermitted


class Requests:
    """The open requests of one connection, by subject, so that a refusal ends those that it is about."""

    def __init__(self, inboxes: Inboxes) -> None:
        self._inboxes = inboxes
        self._waiting: dict[str, set[Callable[[], None]]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))

    @contextmanager
    def open(self, subject: str) -> Iterator[tuple[str, asyncio.Future[Message]]]:
        """A reply subject, and the first answer that comes there."""
        answer: asyncio.Future[Message] = asyncio.get_running_loop().create_future()

        def on_message(message: Message) -> None:
            if not answer.done():
                answer.set_result(message)

        def on_refusal(refusal: NotPermitted) -> None:
            if not answer.done():
                answer.set_exception(refusal)

        with self._expecting(subject, on_message, on_refusal) as reply:
            yield reply, answer

    @contextmanager
    def open_many(self, subject: str) -> Iterator[tuple[str, asyncio.Queue[Message | NotPermitted]]]:
        """A reply subject, and all that comes there, or the refusal."""
        answers: asyncio.Queue[Message | NotPermitted] = asyncio.Queue()
        with self._expecting(subject, answers.put_nowait, answers.put_nowait) as reply:
            yield reply, answers

    def refuse(self, subject: str) -> None:
        """Ends the requests on a subject that this user may not publish to; case is ignored."""
        for on_refusal in list(self._waiting.get(subject.lower(), ())):
            on_refusal()

    @contextmanager
    def _expecting(
        self, subject: str, on_message: Callback, on_refusal: Callable[[NotPermitted], None]
    ) -> Iterator[str]:
        key = subject.lower()

        def refused() -> None:
            on_refusal(NotPermitted(f"not permitted to publish to {subject}"))

        self._waiting.setdefault(key, set()).add(refused)
        inbox = self._inboxes.open(on_message)
        try:
            yield inbox.subject
        finally:
            inbox.close()
            self._waiting[key].discard(refused)
            if not self._waiting[key]:
                del self._waiting[key]
