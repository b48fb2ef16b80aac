"""Detects that the worker of a silent request is gone.

A worker that is killed cannot report the end of its live requests. After some seconds of silence the client
therefore asks whether a worker still has the request; that worker answers. This distinguishes a slow worker
from a dead one.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Final

from inferbus.schemas import headers
from inferbus.workers.bus.connection.bus import Bus
from inferbus.workers.bus.connection.message import NO_RESPONDERS, Message
from inferbus.workers.client.errors import WorkerLost

ASK_AFTER: Final = 5.0
"""Seconds of silence before the first question."""

ASK_EVERY: Final = 2.0
"""Seconds between questions."""

MAX_UNANSWERED: Final = 6
"""Unanswered questions after which the worker counts as lost: SGLang blocks its worker for up to five
seconds, and a worker that has lost the server reconnects within a few seconds of its return."""


class LivenessProbe:
    """Asks whether a worker has a request.

    Args:
        bus: The connection.
        owner: Of the job; `live` for a live request.
        job: Its id.
        clock: Monotonic seconds.

    Attributes:
        heard: When a worker last said that it has it, by that clock; minus infinity before.
    """

    def __init__(
        self, bus: Bus, owner: str, job: str, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.heard = -math.inf
        self._bus = bus
        self._clock = clock
        self._subject = bus.subjects.alive(owner, job)
        self._any_job = f"{self._subject.rpartition('.')[0]}.*"
        self._unanswered = 0
        self._inbox = bus.inbox(self._on_answer)

    def ask(self) -> None:
        """Sends the next question.

        Raises:
            WorkerLost: The last `MAX_UNANSWERED` questions were not answered.
        """
        if not self._bus.may_publish(self._any_job):
            # A user who may not ask about one request may not ask about any.
            return
        if not self._bus.settled:
            # The connection is lost or just back: silence means nothing.
            self._unanswered = 0
        if self._unanswered >= MAX_UNANSWERED:
            # The caller may be more patient, and go on asking.
            self._unanswered = 0
            raise WorkerLost("no worker works on this request any more; send it again")
        self._unanswered += 1
        self._bus.send(self._subject, b"", reply=self._inbox.subject)

    def close(self) -> None:
        """Stops listening for answers."""
        self._inbox.close()

    def _on_answer(self, message: Message) -> None:
        if message.status != NO_RESPONDERS and headers.WORKER in message.headers:
            self._unanswered, self.heard = 0, self._clock()
