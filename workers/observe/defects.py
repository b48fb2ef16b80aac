"""Exceptions that nobody expected, at the places that keep a program going all the same.

    try:
        callback(message)
    except Exception:  # supervision point: the connection's read loop calls this
        defects.exception("bus.callback_failed", subject=subject)

Each is logged with its traceback, and counted under the log's event; Prometheus gets the counts with the
figures of a worker or a gateway. Ruff knows this module as a logger (BLE001): a broad `except` that neither
raises again nor logs is refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final, Literal, get_args

import structlog

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric

log = structlog.get_logger()

Event = Literal[
    "bus.callback_failed",
    "bus.read_failed",
    "bus.write_failed",
    "gateway.defect",
    "handoff.defect",
    "job.defect",
    "jobs.pull_failed",
    "jobs.reordering_failed",
    "metrics.not_counted",
    "registry.load_failed",
    "request.defect",
    "starting.defect",
]
"""What the log calls them."""

counts: Final[dict[Event, int]] = dict.fromkeys(get_args(Event), 0)
"""How often each was caught in this process."""


def exception(event: Event, **fields: Any) -> None:
    """Logs and counts the exception that is being handled.

    Args:
        event: Of the log, and the label of the count.
        fields: Of the log; never what a request holds.
    """
    counts[event] += 1
    log.exception(event, **fields)


class Collector:
    """The counts for Prometheus, each of them from 0 on.

    Args:
        labels: Of every series beside `event`.
    """

    def __init__(self, labels: dict[str, str]) -> None:
        self._labels = labels

    def collect(self) -> Iterator[Metric]:
        """For `prometheus_client`."""
        from prometheus_client.core import CounterMetricFamily

        family = CounterMetricFamily(
            "inferbus_defects",
            "Unexpected exceptions that were caught, by their event in the log.",
            labels=(*self._labels, "event"),
        )
        for event, count in counts.items():
            family.add_metric((*self._labels.values(), event), count)
        yield family
