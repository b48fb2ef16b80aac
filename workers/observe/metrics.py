"""A worker's figures for Prometheus.

    async with endpoint.serving(settings, health) as port:
        if port is not None:
            metrics = serve(port, engine.info, role=role)
            metrics.handed_off(seconds=0.2, error=None, transfer=None)

Everything is counted once, when a request, a job's delivery or a hand-off has
ended, never for a token. Labels are few and have few values: the worker's role
and model, a kind, a class, a status, an error's code. Which worker it was
Prometheus knows from where it asked; ids and owners are in the logs.

Every series exists at 0 from the start. One that came into being with its first
event would have no earlier value, and `rate` and `increase` would miss that event.

`prometheus_client` is imported when an engine is up, not before. SGLang's
`--enable-metrics` sets `PROMETHEUS_MULTIPROC_DIR`, which decides at that import
how values are kept. Its processes then share their figures as files in that
folder, and they are served here beside ours.
"""

from __future__ import annotations

import functools
import itertools
import os
from collections.abc import Callable, Iterator
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, Final, ParamSpec, get_args

import structlog

from inferbus.schemas.errors import BY_CODE, CODES, InferbusError
from inferbus.schemas.fleet import Load, Role
from inferbus.schemas.handoff import Transfer
from inferbus.schemas.headers import Status
from inferbus.schemas.subjects import CLASSES, KINDS
from inferbus.workers.bus.connection.bus import Bus
from inferbus.workers.bus.jetstream.clock import ServerClock
from inferbus.workers.engine.interface import EngineInfo
from inferbus.workers.jobs.attempt import Attempt
from inferbus.workers.jobs.observer import Observer, Settlement
from inferbus.workers.jobs.outcome import AttemptOutcome, status_of
from inferbus.workers.observe import defects
from inferbus.workers.observe.endpoint import Endpoint, Unserved

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric

log = structlog.get_logger()

PREFIX: Final = "inferbus_"
SHARED: Final = "PROMETHEUS_MULTIPROC_DIR"

LIVE: Final = "live"
"""The class of live requests."""

REQUEST_SECONDS: Final = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
FIRST_SECONDS: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.4, 0.8, 1.5, 3, 6, 12, 30, 60)
TRANSFER_SECONDS: Final = (
    *(0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05),
    *(0.1, 0.2, 0.5, 1, 2, 5, 10, 30),
)
TRANSFER_BYTES: Final = tuple(4.0**power for power in range(6, 18))
"""From 4 KiB to 16 GiB."""


P = ParamSpec("P")


def _harmless(count: Callable[P, None]) -> Callable[P, None]:
    """No answer is lost for a figure: what counting raises is logged."""

    @functools.wraps(count)
    def counted(*arguments: P.args, **named: P.kwargs) -> None:
        try:
            count(*arguments, **named)
        except Exception:  # a supervision point: the answers of all requests pass through here
            defects.exception("metrics.not_counted")

    return counted


class Metrics(Observer):
    """What one worker counts.

    Args:
        role: Of the worker.
        engine: Its engine, which is up.

    Attributes:
        registry: What Prometheus gets.
        room: Bytes used and allowed of streams, as last looked up.
    """

    def __init__(self, role: Role, engine: EngineInfo) -> None:
        from prometheus_client import (
            CollectorRegistry,
            Counter,
            Histogram,
            ProcessCollector,
            disable_created_metrics,
        )

        # When each was made, as a series of its own beside every other: twice as many, of no use to anyone.
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = registry = CollectorRegistry()
        self._always = always = {"role": role, "model": engine.model}
        self._engine = engine
        self.room: dict[str, tuple[int, int]] = {}

        def counter(name: str, help: str, *labels: str) -> _Family:
            return _Family(Counter(PREFIX + name, help, (*always, *labels), registry=registry), always)

        def histogram(name: str, help: str, buckets: tuple[float, ...], *labels: str) -> _Family:
            names = (*always, *labels)
            return _Family(Histogram(PREFIX + name, help, names, registry=registry, buckets=buckets), always)

        self._requests = counter(
            "requests",
            "Requests that ended, every attempt at a job counted; class `live` for live ones.",
            *("kind", "class", "status", "code"),
        )
        self._request_seconds = histogram(
            "request_seconds",
            "From taking a request to the end of its answer.",
            REQUEST_SECONDS,
            *("kind", "class", "status"),
        )
        self._first_chunk_seconds = histogram(
            "first_chunk_seconds",
            "From taking a request to the first chunk of a streamed answer.",
            FIRST_SECONDS,
            *("kind", "class"),
        )
        self._queue_wait_seconds = histogram(
            "queue_wait_seconds",
            "From the submission of a job to its attempt, by the server's clock.",
            REQUEST_SECONDS,
            "class",
        )
        self._admission_wait_seconds = histogram(
            "admission_wait_seconds",
            "From the attempt's beginning until the engine had room for it.",
            REQUEST_SECONDS,
            "class",
        )
        self._chunks = counter("chunks", "Chunks of streamed answers.", "kind", "class")
        self._jobs = counter(
            "jobs", "Deliveries of durable jobs, by what became of them.", "class", "outcome", "code"
        )
        self._redeliveries = counter("redeliveries", "Attempts at durable jobs after the first one.", "class")
        self._handoffs = counter(
            "handoffs", "Hand-offs that a prefill worker was asked for.", "status", "code"
        )
        self._handoff_seconds = histogram(
            "handoff_seconds",
            "From taking a hand-off to its end: waiting, computing and sending.",
            REQUEST_SECONDS,
            "status",
        )
        self._transfer_seconds = histogram(
            "kv_transfer_seconds",
            "KV transfers, from the first piece sent to the last received.",
            TRANSFER_SECONDS,
        )
        self._transfer_bytes = histogram(
            "kv_transfer_bytes", "KV bytes of each transfer, of one rank of the engine.", TRANSFER_BYTES
        )
        self._create_all(role)
        registry.register(defects.Collector(always))
        ProcessCollector(registry=registry)
        if os.environ.get(SHARED):
            registry.register(_Shared())

    def _create_all(self, role: Role) -> None:
        """Creates every series that this role counts."""
        if role == "prefill":
            self._handoffs("ok", "")
            for status, code in itertools.product(("error", "refused"), CODES):
                self._handoffs(status, code)
            for status in ("ok", "error"):
                self._handoff_seconds(status)
            self._transfer_seconds()
            self._transfer_bytes()
            return
        ends = [("ok", ""), *((status_of(BY_CODE[code]), code) for code in CODES)]
        for kind, cls in itertools.product(KINDS, (LIVE, *CLASSES)):
            self._first_chunk_seconds(kind, cls)
            self._chunks(kind, cls)
            for status, code in ends:
                self._requests(kind, cls, status, code)
            for status in get_args(Status):
                self._request_seconds(kind, cls, status)
        for cls in (LIVE, *CLASSES):
            self._admission_wait_seconds(cls)
        for cls in CLASSES:
            self._queue_wait_seconds(cls)
            self._redeliveries(cls)
            for settlement, code in itertools.product(get_args(Settlement), ("", *CODES)):
                self._jobs(cls, settlement, code)

    @_harmless
    def attempt_ended(self, outcome: AttemptOutcome, seconds: float) -> None:
        """See `Observer`."""
        attempt = outcome.attempt
        kind, cls, status = attempt.kind, _class(attempt), outcome.status
        self._requests(kind, cls, status, outcome.code or "").inc()
        self._request_seconds(kind, cls, status).observe(seconds)
        if outcome.first_chunk is not None:
            self._first_chunk_seconds(kind, cls).observe(outcome.first_chunk)
            self._chunks(kind, cls).inc(outcome.chunks)
        self._admission_wait_seconds(cls).observe(outcome.admitted_after)
        if attempt.durable:
            self._queue_wait_seconds(cls).observe(outcome.queued)
            if attempt.number > 1:
                self._redeliveries(cls).inc()

    @_harmless
    def refused(self, attempt: Attempt, error: InferbusError) -> None:
        """See `Observer`."""
        self._requests(attempt.kind, _class(attempt), "error", error.code).inc()

    @_harmless
    def settled(self, attempt: Attempt, settlement: Settlement, error: InferbusError | None) -> None:
        """See `Observer`."""
        self._jobs(_class(attempt), settlement, error.code if error else "").inc()

    @_harmless
    def handed_off(self, seconds: float, code: str | None, transfer: Transfer | None) -> None:
        """See `Observer`."""
        status = "ok" if code is None else "error"
        self._handoffs(status, code or "").inc()
        self._handoff_seconds(status).observe(seconds)
        if transfer is not None:
            self._transfer_seconds().observe(transfer.seconds)
            self._transfer_bytes().observe(transfer.bytes)

    @_harmless
    def turned_away(self, code: str) -> None:
        """See `Observer`."""
        self._handoffs("refused", code).inc()

    def watch(self, load: Callable[[], Load], bus: Bus, clock: ServerClock) -> None:
        """Has these looked up whenever Prometheus asks.

        Args:
            load: As last announced.
            bus: The worker's connection.
            clock: Compares the worker's clock with the server's.
        """
        self.registry.register(_Current(self._always, self._engine, load, bus, clock, lambda: self.room))


class _Family:
    """A metric; called with the values of its own labels, it gives what counts for these."""

    def __init__(self, metric: Any, always: dict[str, str]) -> None:
        self._metric = metric
        self._always = tuple(always.values())

    def __call__(self, *values: str) -> Any:
        return self._metric.labels(*self._always, *values)


class _Current:
    """Looked up when asked, on the thread that asks: nothing in here waits or changes anything."""

    def __init__(
        self,
        always: dict[str, str],
        engine: EngineInfo,
        load: Callable[[], Load],
        bus: Bus,
        clock: ServerClock,
        room: Callable[[], dict[str, tuple[int, int]]],
    ) -> None:
        self._always = always
        self._engine = engine
        self._load = load
        self._bus = bus
        self._clock = clock
        self._room = room

    def collect(self) -> Iterator[Metric]:
        """For `prometheus_client`."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        load, bus = self._load(), self._bus
        for name, help, value in (
            ("slots", "Requests that the worker holds at most.", load.slots),
            ("slots_busy", "Slots in use.", load.busy),
            ("engine_running_requests", "Requests in the engine's batch.", load.running),
            ("engine_waiting_requests", "Requests that the engine has queued.", load.waiting),
            ("engine_kv_used_tokens", "Tokens of the KV cache in use.", load.kv_used),
            ("kv_forecast_tokens", "KV tokens that admitted requests will need at most.", load.kv_forecast),
            ("admission_queued_requests", "Requests held back before the engine.", load.queued),
            ("engine_kv_tokens", "Tokens that the KV cache has room for.", self._engine.capacity.kv_tokens),
            ("nats_connected", "Whether the worker is connected to NATS.", int(bus.connected)),
            ("clock_skew_seconds", "Worker's clock minus the server's.", self._clock.skew),
        ):
            gauge = GaugeMetricFamily(PREFIX + name, help, labels=tuple(self._always))
            gauge.add_metric(tuple(self._always.values()), value)
            yield gauge
        for name, help, value in (
            ("nats_reconnects", "How often the connection to NATS was made anew.", bus.reconnects),
            ("messages_sent", "Messages handed to the connection to NATS.", bus.writer.sent),
            ("messages_dropped", "Messages lost because NATS was away for too long.", bus.writer.dropped),
        ):
            counter = CounterMetricFamily(PREFIX + name, help, labels=tuple(self._always))
            counter.add_metric(tuple(self._always.values()), value)
            yield counter
        names = (*self._always, "stream")
        used = GaugeMetricFamily(f"{PREFIX}stream_bytes", "Bytes in a stream of NATS.", labels=names)
        allowed = GaugeMetricFamily(f"{PREFIX}stream_max_bytes", "Bytes that it may hold.", labels=names)
        for stream, (bytes_used, limit) in self._room().items():
            used.add_metric((*self._always.values(), stream), bytes_used)
            allowed.add_metric((*self._always.values(), stream), limit)
        yield used
        yield allowed
        info = GaugeMetricFamily(
            f"{PREFIX}worker_info", "Always 1.", labels=(*self._always, "version", "engine")
        )
        info.add_metric((*self._always.values(), version("inferbus"), self._engine.name), 1)
        yield info


class _Shared:
    """SGLang's own figures, of all its processes. Ours are in the same files, and are exported already."""

    def collect(self) -> Iterator[Metric]:
        """For `prometheus_client`."""
        from prometheus_client.multiprocess import MultiProcessCollector

        shared: Any = MultiProcessCollector(None)  # type: ignore[no-untyped-call]
        for family in shared.collect():
            if not family.name.startswith(PREFIX):
                yield family


def _class(attempt: Attempt) -> str:
    return attempt.job_class or LIVE


def check() -> None:
    """Finds out whether SGLang's metrics can be served before the engine is loaded, which takes minutes.

    Raises:
        Unserved: They cannot.
    """
    shared = os.environ.get(SHARED)
    if shared and not os.access(shared, os.W_OK | os.X_OK):
        raise Unserved(f"--metrics-port: {SHARED} names no folder that can be written to")


def serve(endpoint: Endpoint, engine: EngineInfo, *, role: Role) -> Metrics:
    """A worker's metrics, served at a port that is open.

    Args:
        endpoint: The port.
        engine: Of an engine that is up.
        role: Of the worker.
    """
    metrics = Metrics(role, engine)
    from prometheus_client import make_wsgi_app

    endpoint.metrics = make_wsgi_app(metrics.registry)
    return metrics
