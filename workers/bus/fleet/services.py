"""The fleet as NATS services (ADR-32): `nats micro ls`, `info` and `stats` show every worker.

Not nats-py's implementation, which sends the request's headers back with every
answer and has naive dates. It serves no requests; the endpoints that it lists
are the worker's own subscriptions, which report their requests to it.
"""

from __future__ import annotations

import asyncio
import datetime as dt
import re
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Final

import msgspec
import structlog

from inferbus.schemas.errors import InferbusError
from inferbus.schemas.subjects import LIVE_OWNER, escape
from inferbus.workers.bus.connection.bus import Bus
from inferbus.workers.bus.connection.message import Message
from inferbus.workers.bus.connection.subscription import Subscription
from inferbus.workers.bus.durations import nanoseconds

log = structlog.get_logger()

NAME: Final = re.compile(r"[A-Za-z0-9_-]+")
VERSION: Final = re.compile(r"\d+\.\d+\.\d+(?:[-+][0-9A-Za-z.-]+)*")
PREFIX: Final = "$SRV"
TYPE: Final = "io.nats.micro.v1"


class Endpoint:
    """One subject that a worker serves, with its statistics.

    Attributes:
        name: Unique within the service.
        subject: What it listens to.
        queue: Its queue group; empty for none.
        metadata: Shown by `nats micro info`.
        requests: Requests so far.
        errors: Those that failed.
        last_error: Of the last one that did.
        seconds: Time spent on all of them.
    """

    def __init__(
        self, name: str, subject: str, *, queue: str = "", metadata: Mapping[str, str] | None = None
    ) -> None:
        if not NAME.fullmatch(name):
            raise ValueError(f"an endpoint's name has letters, digits, '-' and '_' only: {name!r}")
        self.name = name
        self.subject = subject
        self.queue = queue
        self.metadata = dict(metadata or {})
        self.reset()

    def reset(self) -> None:
        """Sets the counters to zero."""
        self.requests = 0
        self.errors = 0
        self.last_error = ""
        self.seconds = 0.0

    def record(self, seconds: float, error: str | None = None) -> None:
        """A request has ended."""
        self.requests += 1
        self.seconds += seconds
        if error is not None:
            self.errors += 1
            self.last_error = error

    def info(self) -> dict[str, Any]:
        """Its part of the answer to INFO."""
        return {
            "name": self.name,
            "subject": self.subject,
            "queue_group": self.queue,
            "metadata": self.metadata,
        }

    def stats(self) -> dict[str, Any]:
        """Its part of the answer to STATS."""
        total = nanoseconds(self.seconds)
        return {
            "name": self.name,
            "subject": self.subject,
            "queue_group": self.queue,
            "num_requests": self.requests,
            "num_errors": self.errors,
            "last_error": self.last_error,
            "processing_time": total,
            "average_processing_time": total // self.requests if self.requests else 0,
            # Empty, but there: nats-py cannot read an answer without it.
            "data": {},
        }


class Service:
    """One worker as a service.

    Args:
        bus: The connection.
        name: The same for all workers of a kind.
        id: This one's; any name, which is escaped.
        version: Semantic.
        description: One line.
        metadata: Model, role, capacity, …
        endpoints: What it serves.
        replies: Prefixes of allowed reply subjects: a caller must not have a worker publish anywhere else.
        now: Wall clock, aware.
    """

    def __init__(
        self,
        bus: Bus,
        *,
        name: str,
        id: str,
        version: str,
        description: str = "",
        metadata: Mapping[str, str] | None = None,
        endpoints: Sequence[Endpoint] = (),
        replies: tuple[str, ...] = ("_INBOX.",),
        now: Callable[[], dt.datetime] = lambda: dt.datetime.now(dt.UTC),
    ) -> None:
        if not NAME.fullmatch(name):
            raise ValueError("a service's name has letters, digits, '-' and '_' only")
        if not VERSION.fullmatch(version):
            raise ValueError(f"a service's version is semantic: {version!r}")
        self._bus = bus
        self._identity: dict[str, Any] = {
            "name": name,
            # A token of the subjects that `nats micro` asks on.
            "id": escape(id),
            "version": version,
            "metadata": dict(metadata or {}),
        }
        self._description = description
        self._endpoints = list(endpoints)
        self._replies = replies
        self._started = now()
        self._subscriptions: list[Subscription] = []

    @property
    def endpoints(self) -> list[Endpoint]:
        """What it serves."""
        return self._endpoints

    def ping(self) -> dict[str, Any]:
        """The answer to PING."""
        return {"type": f"{TYPE}.ping_response", **self._identity}

    def info(self) -> dict[str, Any]:
        """The answer to INFO."""
        return {
            "type": f"{TYPE}.info_response",
            **self._identity,
            "description": self._description,
            "endpoints": [endpoint.info() for endpoint in self._endpoints],
        }

    def stats(self) -> dict[str, Any]:
        """The answer to STATS."""
        return {
            "type": f"{TYPE}.stats_response",
            **self._identity,
            "started": self._started.isoformat().replace("+00:00", "Z"),
            "endpoints": [endpoint.stats() for endpoint in self._endpoints],
        }

    async def __aenter__(self) -> Service:
        answers = {"PING": self.ping, "INFO": self.info, "STATS": self.stats}
        name, id = self._identity["name"], self._identity["id"]
        for verb, answer in answers.items():
            for subject in (f"{PREFIX}.{verb}", f"{PREFIX}.{verb}.{name}", f"{PREFIX}.{verb}.{name}.{id}"):
                self._subscriptions.append(await self._bus.subscribe(subject, self._answering(answer)))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await asyncio.gather(*(subscription.unsubscribe() for subscription in self._subscriptions))
        self._subscriptions.clear()

    def _answering(self, answer: Callable[[], dict[str, Any]]) -> Callable[[Message], None]:
        def on_message(message: Message) -> None:
            if not message.reply or message.forwarded:
                return
            try:
                reply = self._bus.subjects.check_reply(
                    message.reply, owner=LIVE_OWNER, prefixes=self._replies
                )
                self._bus.send(reply, msgspec.json.encode(answer()))
            except InferbusError as problem:
                log.warning("services.not_answered", reason=problem.message)

        return on_message
