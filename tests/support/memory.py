"""A broker in memory: `bus.interface` without a server, for tests of the delivery contract."""

from __future__ import annotations

import datetime as dt
from collections.abc import Mapping

from inferbus.schemas.errors import BusUnavailable, PayloadTooLarge
from inferbus.schemas.headers import MSG_ID
from inferbus.workers.bus.interface import PubAck, Stored

EPOCH = dt.datetime(2026, 1, 1, tzinfo=dt.UTC)

STREAMS = {
    "INFER_JOBS": ("jobs",),
    "INFER_STREAM": ("stream",),
    "INFER_RESULTS": ("results", "attempts"),
    "INFER_CANCEL": ("cancel",),
    "INFER_DEAD": ("dead",),
}
"""The families of subjects in each."""


class MemoryBroker:
    """Streams as lists, and everything that was sent; `purged` is what a purge raises."""

    max_payload = 1024 * 1024
    congested = False

    def __init__(self) -> None:
        self.sent: list[Stored] = []
        self.streams: dict[str, list[Stored]] = {name: [] for name in STREAMS}
        self.seconds = 0.0
        self.away = False
        self.purged: Exception | None = None

    def now(self) -> dt.datetime:
        """The clock, which only `seconds` moves."""
        return EPOCH + dt.timedelta(seconds=self.seconds)

    def send(
        self, subject: str, data: bytes, headers: Mapping[str, str] | None = None, *, reply: str = ""
    ) -> None:
        message = self._message(subject, data, headers, len(self.sent) + 1)
        self.sent.append(message)
        stream = self._stream(subject)
        if stream is not None:
            self.streams[stream].append(message)

    async def ready(self) -> None:
        return

    async def flush(self) -> None:
        self._check()

    async def store(
        self,
        subject: str,
        data: bytes,
        headers: Mapping[str, str] | None = None,
        *,
        expect: int | None = None,
    ) -> PubAck | None:
        self._check()
        stream = self._stream(subject)
        if stream is None:
            raise BusUnavailable("no stream takes this subject")
        messages = self.streams[stream]
        named = (headers or {}).get(MSG_ID)
        for message in messages:
            if named and message.headers.get(MSG_ID) == named:
                return PubAck(stream=stream, sequence=message.sequence, duplicate=True)
        newest = max((m.sequence for m in messages if m.subject == subject), default=0)
        if expect is not None and newest != expect:
            return None
        sequence = len(messages) + 1
        messages.append(self._message(subject, data, headers, sequence))
        return PubAck(stream=stream, sequence=sequence)

    async def last(self, stream: str, subject: str) -> Stored | None:
        self._check()
        found = [message for message in self.streams[stream] if message.subject == subject]
        return found[-1] if found else None

    async def read(self, stream: str, subject: str) -> list[Stored]:
        self._check()
        return [message for message in self.streams[stream] if message.subject == subject]

    async def purge(self, stream: str, subject: str) -> None:
        self._check()
        if self.purged is not None:
            raise self.purged
        self.streams[stream] = [each for each in self.streams[stream] if each.subject != subject]

    def _stream(self, subject: str) -> str | None:
        family = subject.split(".")[1]
        return next((name for name, families in STREAMS.items() if family in families), None)

    def _message(self, subject: str, data: bytes, headers: Mapping[str, str] | None, sequence: int) -> Stored:
        return Stored(
            subject=subject, data=data, headers=dict(headers or {}), sequence=sequence, time=self.now()
        )

    def _check(self) -> None:
        if self.away:
            raise BusUnavailable("NATS is away")


class BoundedBroker(MemoryBroker):
    """Refuses large messages, as the connection does."""

    max_payload = 10_000

    def send(
        self, subject: str, data: bytes, headers: Mapping[str, str] | None = None, *, reply: str = ""
    ) -> None:
        if len(data) > self.max_payload:
            raise PayloadTooLarge(f"the message has {len(data)} bytes; the server takes {self.max_payload}")
        super().send(subject, data, headers, reply=reply)


class MemoryDelivery:
    """A delivery that notes how it ended."""

    def __init__(self, message: Stored, attempt: int = 1) -> None:
        self.message = message
        self.attempt = attempt
        self.ended: list[tuple[str, object]] = []
        self.stale = self.forgotten = False

    async def ack(self) -> None:
        self.ended.append(("ack", None))

    async def nak(self, delay: float) -> None:
        self.ended.append(("nak", delay))

    async def term(self, reason: str) -> None:
        self.ended.append(("term", reason))
