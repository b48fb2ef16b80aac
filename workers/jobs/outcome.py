"""How an attempt went."""

from __future__ import annotations

import msgspec

from inferbus.schemas import headers
from inferbus.schemas.errors import Cancelled, DeadlineExceeded, InferbusError
from inferbus.schemas.objects import ObjectRef
from inferbus.workers.jobs.attempt import Attempt
from inferbus.workers.jobs.reply import Reply
from inferbus.workers.tracing import Span


class AttemptOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """How an attempt went.

    Attributes:
        attempt: Which one.
        reply: Where its chunks went.
        body: The whole answer, or the error as an answer.
        error: None on success.
        streamed: Whether the answer has gone out in chunks already.
        usage: Whether the usage is part of the answer as it was asked for.
        chunks: How many have gone out.
        first_chunk: Seconds from the attempt's beginning to the first one; None where none has gone out.
        queued: Seconds from the arrival of the request to the attempt's beginning.
        admitted_after: Seconds that it was held back before the engine.
        apart: Where the body is stored, if it is too large for a message.
        span: Of the attempt; what is done with the outcome is traced below it.
    """

    attempt: Attempt
    reply: Reply
    body: bytes
    error: InferbusError | None
    streamed: bool
    usage: bool = True
    chunks: int = 0
    first_chunk: float | None = None
    queued: float = 0.0
    admitted_after: float = 0.0
    apart: ObjectRef | None = None
    span: Span | None = None

    @property
    def status(self) -> headers.Status:
        """For the end mark."""
        return status_of(type(self.error) if self.error is not None else None)

    @property
    def code(self) -> str | None:
        """Of the error; None on success."""
        return self.error.code if self.error is not None else None

    def answer(self) -> None:
        """Sends what is still to be sent, and the end mark."""
        if self.apart is None and (self.error is not None or not self.streamed):
            self.reply.whole(self.body)
        self.reply.end(self.status, self.apart)


def status_of(error: type[InferbusError] | None) -> headers.Status:
    """The status of an answer that ended with such an error; None: with none."""
    if error is None:
        return "ok"
    if issubclass(error, Cancelled):
        return "cancelled"
    return "expired" if issubclass(error, DeadlineExceeded) else "error"
