"""The answer of one attempt, as it goes out: chunks in order, then the end mark."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any, Final

import msgspec

from inferbus.schemas import codec, headers
from inferbus.schemas.answers import Retrying, TokenChunk
from inferbus.schemas.errors import ErrorAnswer, InferbusError, LeaseLost, PayloadTooLarge
from inferbus.schemas.headers import Continuation
from inferbus.schemas.objects import ObjectRef, object_header
from inferbus.workers.bus.interface import Broker
from inferbus.workers.jobs.attempt import Attempt
from inferbus.workers.jobs.retained import RetainedAnswer
from inferbus.workers.jobs.split import halves

_NO_FIELDS: Final[Mapping[str, Any]] = {}
_NO_HEADERS: Final[Mapping[str, str]] = {}


class Served(msgspec.Struct, frozen=True, kw_only=True):
    """Who answered.

    Attributes:
        worker: The worker that owns the attempt.
        prefill: The prefill worker of the first choice, once one has served it.
    """

    worker: str
    prefill: str | None = None


class Reply:
    """Sends the messages of one attempt; `seq` counts them from 0.

    Args:
        broker: Where to.
        attempt: That is answered.
        served: Named on the end mark.
        probe: Reply subject put on every `probe_every`-th message: the server answers there when the reply
            has no subscriber any more.
        probe_every: See `probe`.
        lost: Whether the job may belong to another worker by now.
        retained: Keeps what is sent; None: nothing is kept.

    Attributes:
        served: As far as it is known.
        sent: Messages so far, the end mark not counted.
        begun: Monotonic time of the first chunk; None before it.
    """

    def __init__(
        self,
        broker: Broker,
        attempt: Attempt,
        served: Served,
        *,
        probe: str = "",
        probe_every: int = 16,
        lost: Callable[[], bool] = lambda: False,
        retained: RetainedAnswer | None = None,
    ) -> None:
        self._broker = broker
        self._attempt = attempt
        self._retained = retained
        self._probe = probe
        self._probe_every = probe_every
        self._lost = lost
        self._continues: Continuation | None = None
        self._encoder = ChunkEncoder(attempt)
        self._headers = _identity(attempt)
        self.served = served
        self.sent = 0
        self.begun: float | None = None

    def served_by(self, prefill: str) -> None:
        """Notes the prefill worker of the first choice."""
        self.served = Served(worker=self.served.worker, prefill=prefill)

    def continue_after(self, earlier: Continuation) -> None:
        """Notes the attempt that this one continues; the first chunk names it."""
        self._continues = earlier

    def chunk(self, message: msgspec.Struct | bytes, extra: Mapping[str, Any] = _NO_FIELDS) -> None:
        """Sends one chunk; in several messages where the server would not take it in one.

        Args:
            message: From an `AnswerFormatter`.
            extra: Further fields of this message.

        Raises:
            PayloadTooLarge: Over the server's limit, and nothing in it can be cut.
            LeaseLost: Another worker may be answering by now.
        """
        if self._lost():
            raise LeaseLost("another worker may have taken the job over")
        if self.begun is None:
            self.begun = time.monotonic()
        self._fit(message, extra)

    def _fit(self, message: msgspec.Struct | bytes, extra: Mapping[str, Any]) -> None:
        try:
            self._send(self._encoder.chunk(message, self.sent, extra))
        except PayloadTooLarge:
            parts = halves(message)
            if parts is None:
                raise
            # The tokens come with the last part: before it, the text says less than they do.
            tokens = {name: extra[name] for name in ("token_ids",) if name in extra}
            self._fit(parts[0], {name: value for name, value in extra.items() if name not in tokens})
            self._fit(parts[1], tokens)

    @property
    def congested(self) -> bool:
        """Whether to wait for `ready` before the next chunk."""
        return self._broker.congested

    async def ready(self) -> None:
        """Waits while more is queued for sending than should be."""
        await self._broker.ready()

    def retrying(self, error: InferbusError) -> None:
        """Announces that this attempt is over and another will follow; no end mark comes."""
        event = Retrying(job=self._attempt.job, attempt=self._attempt.number, retrying=error.body())
        self._send(codec.encode(event, self._attempt.content_type))

    def whole(self, body: bytes, fields: Mapping[str, str] = _NO_HEADERS) -> None:
        """Sends the answer in one piece, or an error.

        Args:
            body: The answer.
            fields: Headers of this message.
        """
        self._send(body, fields)

    def end(self, status: headers.Status, apart: ObjectRef | None = None) -> None:
        """The end mark: an empty body (ADR-47).

        Args:
            status: How the answer ended.
            apart: Where the whole answer is stored, which was too large to be sent.
        """
        fields = {
            headers.STATUS: status,
            headers.CHUNKS: str(self.sent),
            **served_headers(self._attempt, self.served),
            **object_header(apart),
        }
        if self._retained is None:
            self._broker.send(self._attempt.reply, b"", fields)
        else:
            self._broker.send(self._retained.reply, b"", fields)
            self._retained.end(fields)

    def _send(self, body: bytes, more: Mapping[str, str] = _NO_HEADERS) -> None:
        probe = self._probe if self.sent % self._probe_every == 0 else ""
        fields = self._headers
        if fields is not None and self.sent == 0:
            # A killed server forgets its newest deliveries: two workers may then make the same attempt.
            fields = fields | {headers.WORKER: self.served.worker}
            if self._continues is not None:
                fields[headers.CONTINUES] = str(self._continues)
        if fields is not None and more:
            fields = {**fields, **more}
        retained = self._retained
        if retained is None:
            self._broker.send(self._attempt.reply, body, fields, reply=probe)
        else:
            # Its caller may have named another subject since.
            self._broker.send(retained.reply, body, fields, reply=probe)
            retained.append(body)
        self.sent += 1


class ChunkEncoder:
    """Encodes the messages of an `AnswerFormatter`, with job, attempt and `seq`.

    Chat and completion messages come from SGLang as JSON text: `job`, `attempt` and what else is given go
    in front of its own fields without decoding it, unless the caller wants MessagePack.
    """

    def __init__(self, attempt: Attempt) -> None:
        self._job, self._number, self._type = attempt.job, attempt.number, attempt.content_type
        self._encode = (
            msgspec.msgpack.Encoder() if self._type == codec.MSGPACK else msgspec.json.Encoder()
        ).encode
        self._prefix = codec.encode({"job": self._job, "attempt": self._number})[:-1]

    def chunk(self, message: msgspec.Struct | bytes, seq: int, extra: Mapping[str, Any]) -> bytes:
        """A chunk, the `seq`-th of its attempt."""
        if isinstance(message, TokenChunk):
            message.job, message.attempt, message.seq = self._job, self._number, seq
            return self._encode(message)
        return self.whole(message, {"seq": seq, **extra})

    def whole(self, message: msgspec.Struct | bytes, extra: Mapping[str, Any]) -> bytes:
        """A message with further fields; a struct has them as its own."""
        if not isinstance(message, bytes):
            for name, value in {"job": self._job, "attempt": self._number, **extra}.items():
                setattr(message, name, value)
            return self._encode(message)
        if self._type == codec.MSGPACK:
            own = {"job": self._job, "attempt": self._number, **extra}
            return self._encode(own | msgspec.json.decode(message))
        middle = b"," + codec.encode(extra)[1:-1] if extra else b""
        return b"%b%b,%b" % (self._prefix, middle, message[1:])


def error_body(attempt: Attempt, error: InferbusError) -> bytes:
    """An error as an answer."""
    answer = ErrorAnswer(error=error.body(), job=attempt.job, attempt=attempt.number)
    return codec.encode(answer, attempt.content_type)


def served_headers(attempt: Attempt, served: Served) -> dict[str, str]:
    """Who answered which attempt, for end marks and results."""
    fields = {
        headers.ATTEMPT: str(attempt.number),
        headers.CONTENT_TYPE: attempt.content_type,
        headers.WORKER: served.worker,
    }
    if served.prefill is not None:
        fields[headers.PREFILL_WORKER] = served.prefill
    if attempt.submission is not None:
        fields[headers.SUBMISSION] = str(attempt.submission)
    return fields


def _identity(attempt: Attempt) -> dict[str, str] | None:
    """Headers of a durable job's chunks; a live request's have none, since its body has all of it."""
    if attempt.submission is None:
        return None
    return {headers.SUBMISSION: str(attempt.submission), headers.ATTEMPT: str(attempt.number)}
