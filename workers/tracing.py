"""Traces: OpenTelemetry's spans of a request's way, from the queue to the last token.

    chat llama             one attempt; its parent is a live caller's span, its link a job's submitter's
    ├── queue              from a job's submission to the attempt
    ├── prepare            template and tokens
    ├── admission          until the engine has room
    ├── prefill            on decode: from the hand-off until prefill has sent the cache
    │   └── prefill        on the prefill worker
    │       ├── admission
    │       ├── compute    SGLang's own spans are below it, where it traces too
    │       └── transfer   of the KV cache, as the engine measured it
    ├── decode             from the first token to the last; `generate` without a prefill worker
    └── publish            the result is stored, the end mark sent

Context travels as W3C trace context, in the headers `traceparent` and `tracestate`. Off, a span is one test
of a variable, and OpenTelemetry is not imported. No span is made for a token or a chunk.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from importlib.metadata import version
from types import TracebackType
from typing import Any, Final, Literal, TypeAlias

from inferbus.schemas import headers
from inferbus.schemas.errors import InferbusError

FLUSH_SECONDS: Final = 3.0
"""At the end of a process, for spans that were not exported yet."""

Kind = Literal["internal", "server", "client", "consumer"]
Attributes: TypeAlias = Mapping[str, str | int | float]

_FIELDS: Final = (headers.TRACEPARENT, headers.TRACESTATE)
_NONE: Final[dict[str, Any]] = {}

_tracer: Any = None
"""OpenTelemetry's, while this process exports traces."""


class Span:
    """One span, begun by entering it. This one is none: traces are off.

    Attributes:
        headers: The context of what this span causes elsewhere.
    """

    headers: dict[str, str] = _NONE

    def __enter__(self) -> Span:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass

    def set(self, attributes: Attributes) -> None:
        """Adds attributes."""

    def failed(self, code: str) -> None:
        """It ended in an error."""

    def end(self) -> None:
        """Ends it before its block does."""


OFF: Final = Span()


def active() -> bool:
    """Whether this process exports traces."""
    return _tracer is not None


def span(
    name: str,
    *,
    kind: Kind = "internal",
    parent: Span | Mapping[str, str] | None = None,
    links: Mapping[str, str] = _NONE,
    ago: float = 0.0,
    current: bool = True,
    attributes: Attributes = _NONE,
) -> Span:
    """A span around a block.

    Args:
        name: Of few values.
        kind: What it is to its parent.
        parent: A span, or the headers of a message with a caller's context; None: the current span.
        links: The headers of a message whose sender does not wait for it; the span is a trace of its own.
        ago: Seconds before now at which it began.
        current: Whether spans that begin in the block are below it. Not where the block is left for another
            task, as in a generator.
        attributes: To begin with.
    """
    if _tracer is None:
        return OFF
    return _Open(_tracer, name, kind, parent, links, ago, current, attributes)


def past(name: str, seconds: float, attributes: Attributes = _NONE) -> None:
    """A span that ends now and took so many seconds, below the current one."""
    with span(name, ago=seconds, current=False, attributes=attributes):
        pass


def carried() -> dict[str, str]:
    """The current context, as the headers of a message; empty where there is none.

    In a client it is the application's. One that has not imported OpenTelemetry has no context.
    """
    if "opentelemetry.trace" not in sys.modules:
        return {}
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    found: dict[str, str] = {}
    TraceContextTextMapPropagator().inject(found)
    return found


@contextlib.contextmanager
def exporting(*, service: str, instance: str) -> Iterator[None]:
    """Exports this process's spans by OTLP over HTTP while the block runs.

    OpenTelemetry's own variables say where to and how many: `OTEL_EXPORTER_OTLP_ENDPOINT`,
    `OTEL_TRACES_SAMPLER`, and others.

    Args:
        service: The service's name, unless `OTEL_SERVICE_NAME` has another.
        instance: Of this process.
    """
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import OTELResourceDetector, Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    own = {
        "service.name": service,
        "service.instance.id": instance,
        "service.version": version("inferbus"),
    }
    # Not the global provider: SGLang sets that one where it traces too.
    provider = TracerProvider(resource=Resource.create(own).merge(OTELResourceDetector().detect()))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    with using(provider):
        try:
            yield
        finally:
            # Bounded: the exporter tries for longer where nobody answers.
            ending = threading.Thread(target=provider.shutdown, name="traces", daemon=True)
            ending.start()
            ending.join(FLUSH_SECONDS)


@contextlib.contextmanager
def using(provider: Any) -> Iterator[None]:
    """Makes spans by a provider of OpenTelemetry's SDK while the block runs."""
    global _tracer
    before, _tracer = _tracer, provider.get_tracer("inferbus", version("inferbus"))
    try:
        yield
    finally:
        _tracer = before


class _Open(Span):
    """A span of OpenTelemetry's."""

    def __init__(
        self,
        tracer: Any,
        name: str,
        kind: Kind,
        parent: Span | Mapping[str, str] | None,
        links: Mapping[str, str],
        ago: float,
        current: bool,
        attributes: Attributes,
    ) -> None:
        self._tracer = tracer
        self._name = name
        self._kind = kind
        self._parent = parent
        self._links = links
        self._ago = ago
        self._current = current
        self._attributes = attributes
        self._token: Any = None
        self._context: Any = None
        self._span: Any = None

    def __enter__(self) -> Span:
        from opentelemetry import context, trace

        self._span = self._tracer.start_span(
            self._name,
            context=self._above(),
            kind=trace.SpanKind[self._kind.upper()],
            attributes=dict(self._attributes),
            links=[trace.Link(each) for each in _sender(self._links)],
            start_time=time.time_ns() - int(self._ago * 1e9),
        )
        self._context = trace.set_span_in_context(self._span)
        if self._current:
            self._token = context.attach(self._context)
        return self

    def _above(self) -> Any:
        from opentelemetry import context

        if isinstance(self._parent, _Open):
            return self._parent._context
        if isinstance(self._parent, Mapping):
            return _received(self._parent)
        # What has links is a trace of its own.
        return context.Context() if self._links else None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, Exception):
            self.failed(error.code if isinstance(error, InferbusError) else type(error).__name__)
        if self._token is not None:
            from opentelemetry import context

            context.detach(self._token)
        self.end()

    @property
    def headers(self) -> dict[str, str]:  # type: ignore[override]  # only read, like the base's
        """The context of what this span causes elsewhere."""
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        found: dict[str, str] = {}
        TraceContextTextMapPropagator().inject(found, context=self._context)
        return found

    def set(self, attributes: Attributes) -> None:
        """Adds attributes."""
        self._span.set_attributes(dict(attributes))

    def failed(self, code: str) -> None:
        """It ended in an error; the message of one may quote a request."""
        from opentelemetry.trace import Status, StatusCode

        self._span.set_attribute("error.type", code)
        self._span.set_status(Status(StatusCode.ERROR, code))

    def end(self) -> None:
        """Ends it before its block does."""
        if self._span.is_recording():
            self._span.end()


def _received(found: Mapping[str, str]) -> Any:
    """The context in a message's headers; clients of some languages write the names with capitals."""
    from opentelemetry.context import Context
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    fields = {name.lower(): value for name, value in found.items() if name.lower() in _FIELDS}
    return TraceContextTextMapPropagator().extract(fields, context=Context())


def _sender(found: Mapping[str, str]) -> list[Any]:
    """The span that sent a message, if its headers name one."""
    if not found:
        return []
    from opentelemetry import trace

    sender = trace.get_current_span(_received(found)).get_span_context()
    return [sender] if sender.is_valid else []
