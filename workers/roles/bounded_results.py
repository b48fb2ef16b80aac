"""Keeps the owners of finished jobs within their share of the stored results."""

from __future__ import annotations

from inferbus.schemas.errors import InferbusError
from inferbus.workers.bus.jetstream.shares import ResultShares
from inferbus.workers.jobs.attempt import Attempt
from inferbus.workers.jobs.observer import Observer, Settlement
from inferbus.workers.roles.intake import Tasks


class BoundedResults(Observer):
    """Has an owner's share enforced once enough of its jobs have ended here.

    Args:
        shares: Of all owners.
        tasks: Runs it.
    """

    def __init__(self, shares: ResultShares, tasks: Tasks) -> None:
        self._shares = shares
        self._tasks = tasks

    def settled(self, attempt: Attempt, settlement: Settlement, error: InferbusError | None) -> None:
        """See `Observer`."""
        if settlement in ("finished", "dead") and self._shares.due(attempt.owner):
            self._tasks.start(self._shares.enforce(attempt.owner))
