"""Dead letters: jobs that are not tried again, with the reason in headers and the body unchanged."""

from __future__ import annotations

from typing import Final

import structlog

from inferbus.schemas import headers
from inferbus.schemas.errors import InferbusError, PayloadTooLarge
from inferbus.workers.bus.interface import Broker, Stored
from inferbus.workers.jobs.attempt import Attempt, facts
from inferbus.workers.jobs.fields import publishable, without_nats
from inferbus.workers.jobs.settings import JobSettings
from inferbus.workers.jobs.storage import Storage

log = structlog.get_logger()

RAW_CHARS: Final = 8192
"""Characters of an unreadable header block that its dead letter keeps."""


class DeadLetters:
    """Stores the dead letters of one worker.

    Args:
        broker: Where to.
        settings: Of the worker.
        storage: Outlasts outages.
    """

    def __init__(self, broker: Broker, settings: JobSettings, storage: Storage) -> None:
        self._broker = broker
        self._settings = settings
        self._storage = storage

    async def store(
        self, attempt: Attempt, message: Stored, error: InferbusError, *, waits: bool = True
    ) -> None:
        """Stores one; a job that just fitted into a message, and with a letter's headers does not, has none.

        Args:
            attempt: The last one.
            message: The job as submitted.
            error: Why it is not tried again.
            waits: Whether to outlast an outage and wait for room. What anybody can send must not make a
                worker wait.

        Raises:
            BusUnavailable: NATS was away for too long, or there is no room.
        """
        subject = self._settings.subjects.dead(attempt.model, attempt.kind)
        letter = self._headers(attempt, message, error)

        async def store() -> None:
            await self._broker.store(subject, message.data, letter)

        try:
            await (self._storage.store(store, subject=subject) if waits else store())
        except PayloadTooLarge as problem:
            # Its error is still its result.
            log.error("job.no_letter", reason=problem.message, **facts(attempt))

    def _headers(self, attempt: Attempt, message: Stored, error: InferbusError) -> dict[str, str]:
        if message.undecodable is None:
            submitted = publishable(without_nats(message.headers))
        else:
            submitted = {headers.RAW: headers.escaped(message.undecodable)[:RAW_CHARS]}
        return {
            **submitted,
            headers.REASON: error.code,
            headers.DETAIL: error.message,
            headers.ATTEMPT: str(attempt.number),
            headers.JOB_ID: attempt.job,
            headers.SUBJECT: message.subject,
            headers.SUBMISSION: str(message.sequence),
            headers.WORKER: self._settings.worker,
            headers.MSG_ID: f"dead-{message.sequence}",
        }
