"""The gateway's figures for Prometheus. Labels have few values: routes, statuses, reasons."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final, get_args

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)
from starlette.types import Message, Send

from inferbus.workers.gateway.events import Why
from inferbus.workers.observe import defects

FIRST_SECONDS: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)


class Metrics:
    """What one gateway counts.

    Attributes:
        registry: What Prometheus gets.
    """

    def __init__(self) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = registry = CollectorRegistry()
        ProcessCollector(registry=registry)
        self._requests = Counter(
            "inferbus_gateway_requests",
            "Requests, by route and status.",
            ("route", "status"),
            registry=registry,
        )
        self._open = Gauge("inferbus_gateway_open_requests", "Requests being answered.", registry=registry)
        self._first = Histogram(
            "inferbus_gateway_first_byte_seconds",
            "From a request's arrival to the first byte of its answer.",
            ("route",),
            buckets=FIRST_SECONDS,
            registry=registry,
        )
        self._cut = Counter(
            "inferbus_gateway_cut",
            "Answers given up: the caller left, or did not read, or a file was not readable.",
            ("why",),
            registry=registry,
        )
        for why in get_args(Why):
            self._cut.labels(why)
        registry.register(defects.Collector({}))

    @contextmanager
    def request(self, route: str, send: Send) -> Iterator[Send]:
        """Counts one request; yields what its answer is to be sent with."""
        began = time.monotonic()
        status = ""

        async def counting(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = str(message["status"])
                self._first.labels(route).observe(time.monotonic() - began)
            await send(message)

        self._open.inc()
        try:
            yield counting
        finally:
            self._open.dec()
            self._requests.labels(route, status or "499").inc()

    def cut(self, why: Why) -> None:
        """Counts an answer that was given up."""
        self._cut.labels(why).inc()

    def text(self) -> bytes:
        """All of it, in Prometheus's format."""
        return generate_latest(self.registry)
