"""Bundles on the worker's side: every request goes through admission by itself; one result, one attempt.

not begun before  → each request runs when its turn comes → what ended is stored → acknowledged
                    meanwhile what has ended is sent to the submitter, which then does not lose it
begun before      → its worker ended: nothing runs, nothing is answered; the submitter sends each alone
draining          → what has ended is stored, the rest is left to the submitter
"""

from __future__ import annotations

import asyncio
from contextlib import AbstractContextManager
from typing import Final, Protocol

import msgspec
import structlog

from inferbus.schemas import headers
from inferbus.schemas.bundles import CONTENT_TYPE, Bundle, BundleAnswer, Item, ItemAnswer, ItemError
from inferbus.schemas.errors import CallerError, Ended
from inferbus.workers.admission import Permit
from inferbus.workers.bus.interface import Broker, Delivery, Stored
from inferbus.workers.jobs import cancel
from inferbus.workers.jobs.attempt import Envelope
from inferbus.workers.jobs.beginnings import Beginnings
from inferbus.workers.jobs.duplicate import origin
from inferbus.workers.jobs.outcome import AttemptOutcome
from inferbus.workers.jobs.reply import Served, served_headers
from inferbus.workers.jobs.results import FinalResult, ResultStore
from inferbus.workers.jobs.runner import AttemptRunner
from inferbus.workers.jobs.scope import Scope
from inferbus.workers.jobs.settings import JobSettings

log = structlog.get_logger()

HEADERS: Final = 4096
"""Bytes that a result's headers and its frame may take of the server's limit."""

TOLD_EVERY: Final = 0.5
"""Seconds between two messages about requests that have ended. A bundle that is faster needs none."""

ITEM: Final = 64
"""Bytes of an answer's place in a result."""


def is_bundle(message: Stored) -> bool:
    """Whether a job is a bundle."""
    return message.headers.get(headers.CONTENT_TYPE) == CONTENT_TYPE


class Places(Protocol):
    """Where the requests of a bundle get their permits."""

    def feeding(self) -> AbstractContextManager[None]:
        """While the block runs, the worker takes no further job: this one's requests come first."""
        ...

    async def take(self) -> Permit | None:
        """A permit, as soon as there is room for another job; None: the worker is draining."""
        ...


class HeldBundle:
    """One delivery of a bundle.

    Args:
        broker: Where its submitter hears of requests that have ended.
        runner: Makes the attempts.
        cancels: Knows whether it was cancelled.
        results: Stores the result.
        beginnings: Tell whether it began before: a delivery may be lost, or put back, before it begins.
        settings: Of the worker.
        delivery: This one.
        envelope: The job as it came.
    """

    def __init__(
        self,
        broker: Broker,
        runner: AttemptRunner,
        cancels: cancel.Cancels,
        results: ResultStore,
        beginnings: Beginnings,
        settings: JobSettings,
        delivery: Delivery,
        envelope: Envelope,
    ) -> None:
        self._broker = broker
        self._runner = runner
        self._cancels = cancels
        self._results = results
        self._beginnings = beginnings
        self._settings = settings
        self._delivery = delivery
        self._envelope = envelope
        self._answers: list[ItemAnswer] = []
        self._errors: list[ItemError] = []
        self._told = (0, 0)
        self._telling: asyncio.TimerHandle | None = None
        self._size = 0
        self._unstarted: list[int] = []
        self._died = False

    async def handle(self, places: Places) -> tuple[str, bytes] | None:
        """Runs it, stores its result, and acknowledges it.

        Args:
            places: Where its requests get their permits.

        Returns:
            Where a reader waits for the result, and the result; None where another owner's counts.

        Raises:
            BusUnavailable: NATS is away, or was for too long.
        """
        attempt = self._envelope.attempt
        result = await self._results.of(attempt)
        reply, body = self._reply(), None
        if not result.stored:
            if self._delivery.stale:
                return None
            self._died = self._delivery.attempt > 1 and (await self._beginnings.of(attempt)).attempts > 0
            if not self._died:
                await self._beginnings.count(attempt, 0)
                await self._run(places, reply)
            body = await self._store(result)
        await self._beginnings.forget(attempt)
        await self._delivery.ack()
        return None if body is None else (reply, body)

    async def _run(self, places: Places, reply: str) -> None:
        try:
            items = msgspec.json.decode(self._envelope.body, type=Bundle).items
        except (msgspec.DecodeError, UnicodeDecodeError):
            # Its submitter finds nothing answered, and sends the requests by themselves.
            log.error("bundle.unreadable", job=self._envelope.attempt.job)
            return
        scope = self._scope()
        cancelled = await self._cancels.aimed_at(scope)
        running: set[asyncio.Task[None]] = set()
        try:
            with places.feeding():
                for item in items:
                    permit = await places.take()
                    if permit is None:
                        self._unstarted.append(item.id)
                    else:
                        running.add(asyncio.create_task(self._answer(item, permit, reply, cancelled)))
            if running:
                await asyncio.wait(running)
        finally:
            for task in running:
                task.cancel()
            if self._telling is not None:
                self._telling.cancel()

    async def _answer(self, item: Item, permit: Permit, reply: str, cancelled: bool) -> None:
        envelope = self._item(item)
        scope = self._scope()
        if cancelled:
            cancel.end(scope)
        forget = self._runner.scopes.add(scope)
        with permit:
            try:
                outcome = await self._runner.run(
                    envelope, scope, permit=permit, lost=lambda: self._delivery.stale
                )
            finally:
                forget()
        self._note(item, outcome)
        if reply and self._telling is None:
            self._telling = asyncio.get_running_loop().call_later(TOLD_EVERY, self._tell, reply)

    def _tell(self, reply: str) -> None:
        """Sends what has ended since the last time."""
        self._telling = None
        answers, errors = self._answers[self._told[0] :], self._errors[self._told[1] :]
        if self._delivery.stale or self._broker.congested or not (answers or errors):
            return
        attempt = self._envelope.attempt
        part = BundleAnswer(
            job=attempt.job, attempt=attempt.number, answers=answers, errors=errors, partial=True
        )
        self._told = len(self._answers), len(self._errors)
        self._broker.send(reply, msgspec.json.encode(part))

    def _note(self, item: Item, outcome: AttemptOutcome) -> None:
        """Keeps what ended for good, as far as it fits into a result."""
        size = len(outcome.body) + ITEM
        if self._size + size > self._runner.max_payload - HEADERS:
            return
        if outcome.error is None:
            self._answers.append(ItemAnswer(id=item.id, answer=msgspec.Raw(outcome.body)))
        elif isinstance(outcome.error, CallerError | Ended):
            self._errors.append(ItemError(id=item.id, error=outcome.error.body()))
        else:
            return
        self._size += size

    async def _store(self, result: FinalResult) -> bytes | None:
        """Stores the result; None where another owner has stored one."""
        attempt = self._envelope.attempt
        answer = BundleAnswer(
            job=attempt.job,
            attempt=attempt.number,
            answers=self._answers,
            errors=self._errors,
            unstarted=self._unstarted,
            died=self._died,
        )
        body = msgspec.json.encode(answer)
        served = served_headers(attempt, Served(worker=self._settings.worker))
        fields = {headers.STATUS: "ok", **served, **origin(self._delivery.message)}
        fields[headers.CONTENT_TYPE] = CONTENT_TYPE
        return body if await result.store(body, fields) else None

    def _item(self, item: Item) -> Envelope:
        """One request as a job of its own would come."""
        envelope = self._envelope
        attempt = msgspec.structs.replace(
            envelope.attempt, job=f"{envelope.attempt.job}-{item.id}", bundled=True
        )
        own = {name: text for name, text in envelope.headers.items() if name not in _OF_BUNDLE}
        return msgspec.structs.replace(envelope, attempt=attempt, body=bytes(item.body), headers=own)

    def _reply(self) -> str:
        """Where a reader waits for the result; empty where nobody does, or may not."""
        attempt, named = self._envelope.attempt, self._envelope.headers.get(headers.REPLY_TO)
        if named is None:
            return ""
        try:
            return self._settings.subjects.check_reply(
                named, owner=attempt.owner, prefixes=self._settings.replies
            )
        except CallerError as error:
            log.warning("bundle.unanswerable", job=attempt.job, code=error.code)
            return ""

    def _scope(self) -> Scope:
        attempt = self._envelope.attempt
        return Scope(attempt.key, submission=attempt.submission, stored=attempt.arrived)


_OF_BUNDLE: Final = frozenset({headers.CONTENT_TYPE, headers.REPLY_TO, headers.JOB_ID, headers.MSG_ID})
"""Headers that its requests do not have."""
