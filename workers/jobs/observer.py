"""What a worker reports to its metrics."""

from __future__ import annotations

from typing import Literal

from inferbus.schemas.errors import InferbusError
from inferbus.schemas.handoff import Transfer
from inferbus.workers.jobs.attempt import Attempt
from inferbus.workers.jobs.outcome import AttemptOutcome

Settlement = Literal["finished", "retried", "handed_back", "deferred", "dead", "repeated", "left"]
"""What became of a delivery: answered, be it with the caller's error or `cancelled`; to be tried again; given
back by a worker that stops; given back until another job's last attempt is over; given up; answered already;
another worker's by now, or NATS is away."""


class Observer:
    """Hears once of everything that ends in a worker; this one ignores it."""

    def attempt_ended(self, outcome: AttemptOutcome, seconds: float) -> None:
        """An attempt at a request has ended, after so many seconds."""

    def refused(self, attempt: Attempt, error: InferbusError) -> None:
        """A live request was not taken."""

    def settled(self, attempt: Attempt, settlement: Settlement, error: InferbusError | None) -> None:
        """The delivery of a job has come to its end; with the error that it was about."""

    def unread(self, code: str) -> None:
        """A job that cannot be read became a dead letter."""

    def handed_off(self, seconds: float, code: str | None, transfer: Transfer | None) -> None:
        """A hand-off has ended on the prefill side; with an error's code where it failed."""

    def turned_away(self, code: str) -> None:
        """A hand-off was not taken."""


class Observers(Observer):
    """Passes everything on to several observers."""

    def __init__(self, *observers: Observer) -> None:
        self._observers = observers

    def attempt_ended(self, outcome: AttemptOutcome, seconds: float) -> None:
        """See `Observer`."""
        for each in self._observers:
            each.attempt_ended(outcome, seconds)

    def refused(self, attempt: Attempt, error: InferbusError) -> None:
        """See `Observer`."""
        for each in self._observers:
            each.refused(attempt, error)

    def settled(self, attempt: Attempt, settlement: Settlement, error: InferbusError | None) -> None:
        """See `Observer`."""
        for each in self._observers:
            each.settled(attempt, settlement, error)

    def unread(self, code: str) -> None:
        """See `Observer`."""
        for each in self._observers:
            each.unread(code)

    def handed_off(self, seconds: float, code: str | None, transfer: Transfer | None) -> None:
        """See `Observer`."""
        for each in self._observers:
            each.handed_off(seconds, code, transfer)

    def turned_away(self, code: str) -> None:
        """See `Observer`."""
        for each in self._observers:
            each.turned_away(code)
