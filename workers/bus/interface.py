"""What the delivery contract needs of a broker.

`inferbus.workers.jobs` is written against this, so that the same code runs over NATS
and over a simulated broker with virtual time.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Mapping
from typing import Protocol

import msgspec

from inferbus.schemas.objects import ObjectRef


class Stored(msgspec.Struct, frozen=True, kw_only=True):
    """One message of a stream.

    Attributes:
        subject: Its subject.
        data: Its body.
        headers: Its headers; empty where it has none.
        sequence: Its stream sequence.
        time: When the server stored it; aware.
        forwarded: The server stored it on somebody's behalf, as the answer to another message. It is never a
            job, cancel mark, chunk, result or announcement.
        undecodable: The header block as received, where it or the subject is no text; the subject is escaped
            then.
    """

    subject: str
    data: bytes
    headers: Mapping[str, str]
    sequence: int
    time: dt.datetime
    forwarded: bool = False
    undecodable: bytes | None = None


class PubAck(msgspec.Struct, frozen=True, kw_only=True):
    """The server's acknowledgement of a stored message.

    Attributes:
        stream: That holds it.
        sequence: Its stream sequence.
        duplicate: The stream already held a message with this `Nats-Msg-Id`; the sequence is that one's.
    """

    stream: str
    sequence: int
    duplicate: bool = False


class Delivery(Protocol):
    """One delivery of one job; exactly one of `ack`, `nak` and `term` ends it."""

    @property
    def message(self) -> Stored:
        """The job as submitted."""
        ...

    @property
    def attempt(self) -> int:
        """How often it has been delivered, this time included; from 1."""
        ...

    @property
    def stale(self) -> bool:
        """Whether so much time has passed since the last sign of life that the job may be another's now."""
        ...

    @property
    def forgotten(self) -> bool:
        """Whether the server may have forgotten this delivery, and so gives its number to another one."""
        ...

    async def ack(self) -> None:
        """Done with; returns when the server knows.

        Raises:
            BusUnavailable: The server did not say so in time; it may deliver the job again.
        """
        ...

    async def nak(self, delay: float) -> None:
        """Give it back, to be delivered again after `delay` seconds; a stale one is not one's own to give."""
        ...

    async def term(self, reason: str) -> None:
        """Never deliver it again; `reason` goes into the server's advisory."""
        ...


class ObjectStore(Protocol):
    """Where bodies over the server's payload limit are kept, in parts; see `inferbus.schemas.objects`."""

    async def store(self, owner: str, data: bytes) -> ObjectRef:
        """Stores a body; the reference is valid once this returns.

        Raises:
            PayloadTooLarge: Over `limits.OBJECT_BYTES`; nothing was stored.
            BusUnavailable: It was not taken.
        """
        ...

    async def fetch(self, owner: str, reference: ObjectRef) -> bytes:
        """An object's content, checked against its digest.

        Raises:
            InvalidRequest: Parts are missing, or the content is not what the reference describes.
            BusUnavailable: The server did not answer.
        """
        ...

    async def remove(self, owner: str, reference: ObjectRef) -> None:
        """Removes an object.

        Raises:
            BusUnavailable: The server did not answer, or does not allow it.
        """
        ...


class Broker(Protocol):
    """Publishing and looking up; subscribing and pulling are the roles' concern."""

    @property
    def max_payload(self) -> int:
        """Largest message in bytes, headers included."""
        ...

    def send(
        self, subject: str, data: bytes, headers: Mapping[str, str] | None = None, *, reply: str = ""
    ) -> None:
        """Publishes at most once, in the order of calls, without waiting.

        Raises:
            PayloadTooLarge: Over the server's limit.
            InvalidSubject: A subject that cannot be published to.
        """
        ...

    @property
    def congested(self) -> bool:
        """Whether more is queued for sending than should be: time to wait for `ready`."""
        ...

    async def ready(self) -> None:
        """Waits while `congested`."""
        ...

    async def flush(self) -> None:
        """Returns when the server has everything that `send` took.

        Raises:
            BusUnavailable: Not in time.
        """
        ...

    async def store(
        self,
        subject: str,
        data: bytes,
        headers: Mapping[str, str] | None = None,
        *,
        expect: int | None = None,
    ) -> PubAck | None:
        """Publishes into a stream and returns its acknowledgement.

        Args:
            subject: Of a stream.
            data: The body.
            headers: With `Nats-Msg-Id`, a second publish within the stream's window is dropped.
            expect: Only if the subject's newest message has this sequence (0: it holds none); otherwise
                nothing is stored and None returned.

        Raises:
            PayloadTooLarge: Over the server's limit.
            BusUnavailable: No stream took it, or the stream is full.
        """
        ...

    async def last(self, stream: str, subject: str) -> Stored | None:
        """The newest message on a subject, if any.

        Raises:
            BusUnavailable: The server did not answer.
        """
        ...

    async def read(self, stream: str, subject: str) -> list[Stored]:
        """All messages on one subject that the stream still holds, oldest first.

        Raises:
            BusUnavailable: The server did not answer.
        """
        ...

    async def purge(self, stream: str, subject: str) -> object:
        """Removes all messages on one subject.

        Raises:
            BusUnavailable: The server did not answer, or does not allow it.
        """
        ...
