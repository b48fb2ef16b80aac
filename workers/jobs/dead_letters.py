"""Dead letters: jobs that are not tried again, with the reason in headers and the body unchanged."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

import structlog

from inferbus.schemas import headers
from inferbus.schemas.errors import InferbusError, PayloadTooLarge
from inferbus.workers.bus.interface import Broker, Stored
from inferbus.workers.jobs.attempt import Attempt, facts
from inferbus.workers.jobs.fields import without_nats
from inferbus.workers.jobs.retry import outlast_outage
from inferbus.workers.jobs.settings import JobSettings

log = structlog.get_logger()

RAW_CHARS: Final = 8192
"""Characters of an unreadable header block that its dead letter keeps."""


class DeadLetters:
    """Stores the dead letters of one worker.

    Args:
        broker: Where to.
        settings: Of the worker.
        clock: Monotonic seconds.
    """

    def __init__(
        self, broker: Broker, settings: JobSettings, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._broker = broker
        self._settings = settings
        self._clock = clock

    async def store(self, attempt: Attempt, message: Stored, error: InferbusError) -> None:
        """Stores one; a job that just fitted into a message, and with a letter's headers does not, has none.

        Args:
            attempt: The last one.
            message: The job as submitted.
            error: Why it is not tried again.

        Raises:
            BusUnavailable: NATS was away for too long.
        """
        subject = self._settings.subjects.dead(attempt.model, attempt.kind)
        letter = {
            **without_nats(message.headers),
            headers.JOB_ID: attempt.job,
            **self._headers(attempt.number, message, error),
        }
        try:
            await self._store(subject, message, letter)
        except PayloadTooLarge as problem:
            # Its error is still its result.
            log.error("job.no_letter", reason=problem.message, **facts(attempt))

    async def store_unread(self, message: Stored, number: int, error: InferbusError) -> None:
        """Stores one for a job that cannot be read; see `store` for one that does not fit.

        Args:
            message: The job as submitted.
            number: Of the delivery.
            error: Why it cannot be read.

        Raises:
            BusUnavailable: NATS was away for too long.
        """
        subject = self._settings.subjects.dead_unread(message.subject)
        if message.undecodable is None:
            letter = without_nats(message.headers)
        else:
            letter = {headers.RAW: headers.escaped(message.undecodable)[:RAW_CHARS]}
        try:
            await self._store(subject, message, letter | self._headers(number, message, error))
        except PayloadTooLarge as problem:
            log.error("job.no_letter", reason=problem.message, subject=subject, submission=message.sequence)

    async def _store(self, subject: str, message: Stored, letter: dict[str, str]) -> None:
        await outlast_outage(
            lambda: self._broker.store(subject, message.data, letter), subject=subject, clock=self._clock
        )

    def _headers(self, number: int, message: Stored, error: InferbusError) -> dict[str, str]:
        return {
            headers.REASON: error.code,
            headers.DETAIL: error.message,
            headers.ATTEMPT: str(number),
            headers.SUBJECT: message.subject,
            headers.SUBMISSION: str(message.sequence),
            headers.WORKER: self._settings.worker,
            headers.MSG_ID: f"dead-{message.sequence}",
        }
