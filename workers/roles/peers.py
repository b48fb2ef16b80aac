"""The other workers of the model, for a request that only this worker's own limits forbid.

Workers of one name may serve different things; `unlike` warns of it. Whether another one can take a request
is judged by what it announces.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Final

from inferbus.schemas.errors import CallerError, ContextLengthExceeded
from inferbus.schemas.fleet import Capacity, WorkerInfo
from inferbus.workers.engine.interface import EngineInfo
from inferbus.workers.jobs.attempt import Attempt

PASSES: Final = 1000
"""Deliveries after which a job is not given back for another worker any more: more than an hour."""


class Peers:
    """The workers of one model.

    Args:
        workers: Those that are announced, this one too.
    """

    def __init__(self, workers: Callable[[], Sequence[WorkerInfo]]) -> None:
        self._workers = workers

    def fitting(self, attempt: Attempt, error: CallerError, own: EngineInfo) -> str | None:
        """A worker that can take the request, by what it announces; None where there is none.

        A limit that is not announced, such as a reserve of the engine, is the same on workers that are
        alike: where this one, by its own announcement, could take the request, no other one is asked.

        Args:
            attempt: The request.
            error: Why this worker refuses it.
            own: This worker's engine.
        """
        if attempt.passed or attempt.number > PASSES:
            return None
        if attempt.kind in own.kinds and _holds(own.capacity, error):
            return None
        found = [
            (info, info.capacity)
            for info in self._workers()
            if info.state == "ready"
            and attempt.kind in info.kinds
            and (attempt.job_class is None or attempt.job_class in info.classes)
            and info.capacity is not None
            and _holds(info.capacity, error)
        ]
        if not found:
            return None
        # A request is passed on once. Where its length is not known, the longest context is the best choice.
        longest = max(capacity.context_length for _, capacity in found)
        best = [info for info, capacity in found if capacity.context_length == longest]
        free = [info for info in best if info.load.busy < info.load.slots]
        return random.choice(free or best).worker  # noqa: S311


def _holds(capacity: Capacity, error: CallerError) -> bool:
    if not isinstance(error, ContextLengthExceeded):
        return True
    return error.total <= capacity.context_length and error.prompt <= capacity.kv_tokens
