"""Asks the worker of a live request whether it has the request, and for the messages that are missing.

A worker that is killed cannot report the end of its live requests, and messages are lost with a connection.
So the client asks after some seconds of silence, when the connection is back, and when a message is missing.
The worker that has the request answers, and sends again what the client misses. This also distinguishes a
slow worker from a dead one.
"""

from __future__ import annotations

from typing import Final

from inferbus.schemas import headers
from inferbus.schemas.subjects import LIVE_OWNER
from inferbus.workers.bus.connection.bus import Bus
from inferbus.workers.bus.connection.message import NO_RESPONDERS, Callback, Message
from inferbus.workers.client.errors import WorkerLost

ASK_AFTER: Final = 5.0
"""Seconds of silence before the first question."""

ASK_EVERY: Final = 2.0
"""Seconds between questions."""

MAX_UNANSWERED: Final = 6
"""Unanswered questions after which the worker counts as lost: SGLang blocks its worker for up to five
seconds, and a worker that has lost the server reconnects within a few seconds of its return."""


class LivenessProbe:
    """Asks about one live request.

    Args:
        bus: The connection.
        job: The request's id.
        token: The request's `Infer-Resume`.
        answered: Gets the answers, which `alive` reads, and the messages that were asked for. To be the
            callback that gets the other messages of the request's answer: their order says what was lost.

    Attributes:
        subject: Where answers come.
    """

    def __init__(self, bus: Bus, job: str, token: str, answered: Callback) -> None:
        self._bus = bus
        self._token = token
        self._question = bus.subjects.alive(LIVE_OWNER, job)
        self._any_question = f"{self._question.rpartition('.')[0]}.*"
        self._unanswered = 0
        self._inbox = bus.inbox(answered)
        self.subject = self._inbox.subject

    @property
    def permitted(self) -> bool:
        """Whether questions may be sent: a user who may not ask about one request may not ask about any."""
        return self._bus.may_publish(self._any_question)

    def ask(self, missing: int | None) -> None:
        """Sends the next question, unless it is not permitted or the connection is away.

        Args:
            missing: Number of the first message that has not come, to have it and all that follow sent to
                `subject`; None: nothing seems to be missing.

        Raises:
            WorkerLost: The last `MAX_UNANSWERED` questions were not answered.
        """
        if not self.permitted or not self._bus.connected:
            return
        if not self._bus.settled:
            # The connection is just back: silence means nothing.
            self._unanswered = 0
        if self._unanswered >= MAX_UNANSWERED:
            # The caller may be more patient, and go on asking.
            self._unanswered = 0
            raise WorkerLost("no worker works on this request any more; send it again")
        self._unanswered += 1
        fields = {headers.RESUME: self._token}
        if missing is not None:
            fields[headers.FROM] = str(missing)
        self._bus.send(self._question, b"", fields, reply=self.subject)

    def answered_by(self, message: Message) -> bool:
        """Whether a message answers a question; no message of an answer has neither body nor status."""
        if message.subject != self.subject:
            return False
        return message.status == NO_RESPONDERS or not (message.data or headers.STATUS in message.headers)

    def alive(self, message: Message) -> bool:
        """Whether a message says that a worker has the request."""
        if message.status == NO_RESPONDERS or headers.WORKER not in message.headers:
            return False
        self._unanswered = 0
        return True

    def close(self) -> None:
        """Stops listening for answers."""
        self._inbox.close()
