"""Live before interactive before batch: the order in which requests start, in a worker and in its engine."""

from __future__ import annotations

from typing import Final, Literal

ServiceClass = Literal["live", "interactive", "batch"]

LIVE: Final = "live"
INTERACTIVE: Final = "interactive"
BATCH: Final = "batch"
ORDER: Final[tuple[ServiceClass, ...]] = (LIVE, INTERACTIVE, BATCH)
"""The most urgent one first."""
JOBS: Final[tuple[ServiceClass, ...]] = (INTERACTIVE, BATCH)
"""Those of durable jobs."""

_BASE: Final[dict[ServiceClass, int]] = {LIVE: 10_000, INTERACTIVE: 1_000, BATCH: 0}
_OWN_LIMIT: Final = 400

PREEMPTION_THRESHOLD: Final = 5_000
"""Difference of engine priorities above which a running request is retracted for a waiting one: a live
request may displace a job. Jobs displace nothing: the order of taking keeps the shares of their classes."""


def engine_priority(service_class: ServiceClass, own: int | None) -> int:
    """SGLang's priority of a request; higher ones start first.

    Args:
        service_class: Decides between classes.
        own: The caller's `priority`, which orders requests within one class; cut off at ±400.
    """
    return _BASE[service_class] + max(-_OWN_LIMIT, min(_OWN_LIMIT, own or 0))
