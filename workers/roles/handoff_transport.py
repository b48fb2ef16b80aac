"""Hand-offs over NATS: requests to one worker's own subject, answers to an inbox."""

from __future__ import annotations

import asyncio

from inferbus.schemas.fleet import WorkerInfo
from inferbus.workers.bus.connection.bus import Bus
from inferbus.workers.bus.connection.inbox import Inbox
from inferbus.workers.bus.connection.message import NO_RESPONDERS, Message


class BusHandoffTransport:
    """`inferbus.workers.pairing.handoff.HandoffTransport` over a bus."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._inboxes: dict[str, Inbox] = {}

    def request(self, worker: WorkerInfo, body: bytes, answers: asyncio.Queue[bytes | None]) -> str:
        """Sends a hand-off."""

        def answered(message: Message) -> None:
            answers.put_nowait(None if message.status == NO_RESPONDERS else message.data)

        inbox = self._bus.inbox(answered)
        try:
            self._bus.send(self._subject(worker), body, reply=inbox.subject)
        except BaseException:
            inbox.close()
            raise
        self._inboxes[inbox.subject] = inbox
        return inbox.subject

    def send(self, worker: WorkerInfo, body: bytes) -> None:
        """Sends a message that has no answer."""
        self._bus.send(self._subject(worker), body)

    def close(self, ticket: str) -> None:
        """Closes the inbox."""
        inbox = self._inboxes.pop(ticket, None)
        if inbox is not None:
            inbox.close()

    def _subject(self, worker: WorkerInfo) -> str:
        return self._bus.subjects.prefill(worker.model, worker.worker)
