"""What a worker serves, and its figures in the services API (`nats micro stats`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from inferbus.schemas.handoff import Transfer
from inferbus.schemas.subjects import CLASSES, Subjects
from inferbus.workers.bus.fleet.services import Endpoint
from inferbus.workers.config import WorkerSettings
from inferbus.workers.jobs.observer import Observer
from inferbus.workers.jobs.outcome import AttemptOutcome

REQUESTS: Final = "requests"
PREFILL: Final = "prefill"
QUEUE_GROUP: Final = "workers"


def of_decode(subjects: Subjects, model: str, settings: WorkerSettings) -> tuple[Endpoint, ...]:
    """Live requests, all kinds: a kind that this model cannot serve is answered with an error; then jobs."""
    return (
        Endpoint(REQUESTS, subjects.requests_of(model), queue=QUEUE_GROUP),
        *(Endpoint(name, subjects.jobs_of(model, name)) for name in CLASSES if name in settings.classes),
    )


def of_prefill(subjects: Subjects, model: str, worker: str) -> tuple[Endpoint, ...]:
    """Hand-offs to this worker."""
    return (Endpoint(PREFILL, subjects.prefill(model, worker)),)


class EndpointFigures(Observer):
    """Counts on every endpoint what ended there."""

    def __init__(self, endpoints: Sequence[Endpoint]) -> None:
        self._by_name = {endpoint.name: endpoint for endpoint in endpoints}

    def attempt_ended(self, outcome: AttemptOutcome, seconds: float) -> None:
        """See `Observer`."""
        self._by_name[outcome.attempt.job_class or REQUESTS].record(seconds, outcome.code)

    def handed_off(self, seconds: float, code: str | None, transfer: Transfer | None) -> None:
        """See `Observer`."""
        self._by_name[PREFILL].record(seconds, code)
