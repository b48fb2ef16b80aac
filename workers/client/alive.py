"""Whether anybody still works on a live request that has fallen silent.

A worker that is killed takes its live requests with it, and nobody is left to say so. So whoever has waited
for a while asks, and the worker that has the request answers: this tells a slow one from a dead one.
"""

from __future__ import annotations

from typing import Final

from inferbus.schemas.subjects import LIVE_OWNER
from inferbus.workers.bus.connection.bus import Bus
from inferbus.workers.bus.connection.message import NO_RESPONDERS, Message
from inferbus.workers.client.errors import WorkerLost

ASK_AFTER: Final = 5.0
"""Seconds of silence after which to ask."""

ASK_EVERY: Final = 2.0

QUESTIONS: Final = 6
"""So many without an answer: SGLang blocks its worker for up to five seconds, and a worker that has lost the
server is back a few seconds after it."""


class Question:
    """Is somebody at work on this request?

    Args:
        bus: Where to ask.
        job: The request's id.
    """

    def __init__(self, bus: Bus, job: str) -> None:
        self._bus = bus
        self._subject = bus.subjects.alive(LIVE_OWNER, job)
        self._any_job = f"{self._subject.rpartition('.')[0]}.*"
        self._unanswered = 0
        self._inbox = bus.inbox(self._answered)

    def ask(self) -> None:
        """Asks once more.

        Raises:
            WorkerLost: Nobody has answered for too long.
        """
        if not self._bus.may_publish(self._any_job):
            # A user who may not ask about one request may not ask about any.
            return
        if not self._bus.settled:
            # Nothing can be heard at the moment, which says nothing.
            self._unanswered = 0
        if self._unanswered >= QUESTIONS:
            raise WorkerLost("no worker works on this request any more; send it again")
        self._unanswered += 1
        self._bus.send(self._subject, b"", reply=self._inbox.subject)

    def close(self) -> None:
        """Later answers are dropped."""
        self._inbox.close()

    def _answered(self, message: Message) -> None:
        if message.status != NO_RESPONDERS:
            self._unanswered = 0
