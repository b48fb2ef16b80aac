"""The answer to one attempt, as it goes out: chunks in order, then the end mark."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any, Final

import msgspec

from inferbus.schemas import codec, headers
from inferbus.schemas.answers import Retrying, TokenChunk
from inferbus.schemas.errors import ErrorAnswer, InferbusError, LeaseLost
from inferbus.schemas.headers import Continuation
from inferbus.workers.bus.interface import Broker
from inferbus.workers.jobs.job import Job

_NOTHING: Final[Mapping[str, Any]] = {}


class Served(msgspec.Struct, kw_only=True):
    """Who answered.

    Attributes:
        worker: This worker.
        prefill: The prefill worker of the first choice, once one has served it.
    """

    worker: str
    prefill: str | None = None


class Reply:
    """Sends the messages of one attempt; `seq` counts them from 0.

    Args:
        broker: Where to.
        job: The attempt.
        served: Named on the end mark.
        probe: Reply subject put on every `probe_every`-th message: the server answers there when nobody
            listens any more.
        probe_every: See `probe`.
        lost: Whether the job may be somebody else's by now.
        continues: The earlier attempt that this one goes on after, once that is known.
    """

    def __init__(
        self,
        broker: Broker,
        job: Job,
        served: Served,
        *,
        probe: str = "",
        probe_every: int = 16,
        lost: Callable[[], bool] = lambda: False,
    ) -> None:
        self._broker = broker
        self._job = job
        self._served = served
        self._probe = probe
        self._probe_every = probe_every
        self._lost = lost
        self.continues: Continuation | None = None
        self.begun: float | None = None
        """Monotonic time of the first chunk."""
        self._seal = ChunkEncoder(job)
        self._headers = _identity(job)
        self.sent = 0

    def chunk(self, message: msgspec.Struct | bytes, extra: Mapping[str, Any] = _NOTHING) -> None:
        """Sends one chunk.

        Args:
            message: From an `Answer`.
            extra: Further fields of this message.

        Raises:
            PayloadTooLarge: Over the server's limit.
            LeaseLost: Another worker may be answering by now.
        """
        if self._lost():
            raise LeaseLost("another worker may have taken the job over")
        if self.begun is None:
            self.begun = time.monotonic()
        self._send(self._seal.chunk(message, self.sent, extra))

    @property
    def congested(self) -> bool:
        """Whether to wait for `ready` before the next chunk."""
        return self._broker.congested

    async def ready(self) -> None:
        """Waits while more is queued for sending than should be."""
        await self._broker.ready()

    def retrying(self, error: InferbusError) -> None:
        """Tells that this attempt is over and another will follow; no end mark comes."""
        event = Retrying(job=self._job.id, attempt=self._job.attempt, retrying=error.body())
        self._send(codec.encode(event, self._job.content_type))

    def whole(self, body: bytes) -> None:
        """Sends the answer in one piece, or an error."""
        self._send(body)

    def end(self, status: headers.Status) -> None:
        """The end mark: an empty body (ADR-47)."""
        found = {
            headers.STATUS: status,
            headers.CHUNKS: str(self.sent),
            **served_headers(self._job, self._served),
        }
        self._broker.send(self._job.reply, b"", found)

    def _send(self, body: bytes) -> None:
        probe = self._probe if self.sent % self._probe_every == 0 else ""
        found = self._headers
        if self.continues is not None and self.sent == 0:
            found = {**(found or {}), headers.CONTINUES: str(self.continues)}
        self._broker.send(self._job.reply, body, found, reply=probe)
        self.sent += 1


class ChunkEncoder:
    """Encodes an `Answer`'s messages with the job's identity.

    Chat and completion messages come from SGLang as JSON text: `job`, `attempt` and what else is given go
    in front of its own fields without decoding it, unless the caller wants MessagePack.
    """

    def __init__(self, job: Job) -> None:
        self._job, self._attempt, self._type = job.id, job.attempt, job.content_type
        self._encode = (
            msgspec.msgpack.Encoder() if self._type == codec.MSGPACK else msgspec.json.Encoder()
        ).encode
        self._prefix = codec.encode({"job": job.id, "attempt": job.attempt})[:-1]

    def chunk(self, message: msgspec.Struct | bytes, seq: int, extra: Mapping[str, Any]) -> bytes:
        """A chunk, the `seq`-th of its attempt."""
        if isinstance(message, TokenChunk):
            message.job, message.attempt, message.seq = self._job, self._attempt, seq
            return self._encode(message)
        return self.whole(message, {"seq": seq, **extra})

    def whole(self, message: msgspec.Struct | bytes, extra: Mapping[str, Any]) -> bytes:
        """A message with further fields; a struct has them as its own."""
        if not isinstance(message, bytes):
            for name, value in {"job": self._job, "attempt": self._attempt, **extra}.items():
                setattr(message, name, value)
            return self._encode(message)
        if self._type == codec.MSGPACK:
            own = {"job": self._job, "attempt": self._attempt, **extra}
            return self._encode(own | msgspec.json.decode(message))
        middle = b"," + codec.encode(extra)[1:-1] if extra else b""
        return b"%b%b,%b" % (self._prefix, middle, message[1:])


def error_body(job: Job, error: InferbusError) -> bytes:
    """An error as an answer."""
    answer = ErrorAnswer(error=error.body(), job=job.id, attempt=job.attempt)
    return codec.encode(answer, job.content_type)


def served_headers(job: Job, served: Served) -> dict[str, str]:
    """Who answered which attempt, for end marks and results."""
    found = {
        headers.ATTEMPT: str(job.attempt),
        headers.CONTENT_TYPE: job.content_type,
        headers.WORKER: served.worker,
    }
    if served.prefill is not None:
        found[headers.PREFILL_WORKER] = served.prefill
    if job.submission is not None:
        found[headers.SUBMISSION] = str(job.submission)
    return found


def _identity(job: Job) -> dict[str, str] | None:
    """Headers of a durable job's chunks; a live request's have none, since its body says it all."""
    if job.submission is None:
        return None
    return {headers.SUBMISSION: str(job.submission), headers.ATTEMPT: str(job.attempt)}
