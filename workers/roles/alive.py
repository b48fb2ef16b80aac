"""The service `infer.alive.<owner>.<job>`: says which worker has a request, and sends live answers again."""

from __future__ import annotations

import structlog

from inferbus.schemas import headers
from inferbus.schemas.errors import CallerError
from inferbus.schemas.subjects import LIVE_OWNER
from inferbus.workers.bus.connection.bus import Bus
from inferbus.workers.bus.connection.message import Message
from inferbus.workers.jobs.runner import AttemptRunner
from inferbus.workers.jobs.settings import JobSettings

log = structlog.get_logger()


class Alive:
    """Answers for one worker; a worker that does not have the request says nothing.

    Args:
        bus: Connected.
        settings: Of this worker.
        runner: Makes the attempts, and keeps what they sent.
    """

    def __init__(self, bus: Bus, settings: JobSettings, runner: AttemptRunner) -> None:
        self._bus = bus
        self._settings = settings
        self._runner = runner

    def asked(self, message: Message) -> None:
        """A reader misses messages; the worker of a live request sends them again."""
        if message.forwarded:
            return
        settings = self._settings
        try:
            key = settings.subjects.parse_key(message.subject, "alive")
            reply = settings.subjects.check_reply(message.reply, owner=key.owner, prefixes=settings.replies)
        except CallerError as error:
            log.warning("alive.ignored", code=error.code)
            return
        token = message.headers.get(headers.RESUME)
        if token is None:
            if self._runner.scopes.find(key):
                self._bus.send(reply, b"", {headers.WORKER: settings.worker})
            return
        if key.owner == LIVE_OWNER:
            self._say(reply, key.job, token, headers.number(message.headers, headers.FROM))

    def _say(self, reply: str, job: str, token: str, number: int | None) -> None:
        """Says how much of a live answer was sent, and sends it again from `number` on, if that is wanted."""
        retained, first = self._runner.retained, number
        answer = retained.find(job, token)
        sent = retained.dropped(job, token) if answer is None else answer.sent
        if sent is None:
            return
        if number is not None:
            first = sent
            if answer is not None:
                self._runner.listeners.moved(answer.reply, reply)
                first = answer.resume(reply, number)
        fields = {headers.WORKER: self._settings.worker, headers.NEXT: str(sent)}
        if first is not None:
            fields[headers.FROM] = str(first)
        # Behind the messages: the caller has them all when it hears this, or they were lost again.
        self._bus.send(reply, b"", fields)
