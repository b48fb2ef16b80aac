"""Durable jobs: naming, submitting and cancelling one."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Final

import msgspec

from inferbus.schemas import headers
from inferbus.schemas.errors import BusUnavailable, Overloaded
from inferbus.workers.bus.connection.bus import Bus
from inferbus.workers.bus.connection.message import Message
from inferbus.workers.bus.errors import NoResponders, NotPermitted
from inferbus.workers.client.messages import submission_of

RETRIES: Final = 2
RETRY_PAUSE: Final = 0.25
"""A publish that no NATS stream acknowledges is repeated twice, this many seconds apart, as NATS's own
clients do: while a stream elects a leader there is none."""


class JobHandle(msgspec.Struct, frozen=True, kw_only=True):
    """Names a submitted job.

    Attributes:
        id: Its id; unique for its owner.
        owner: Who submitted it.
        submission: The submission's sequence in the NATS stream; None for a job that is known by its id
            alone.
        duplicate: Whether it had been submitted before, and this submission was dropped.
    """

    id: str
    owner: str
    submission: int | None = None
    duplicate: bool = False

    def matches(self, message_headers: Mapping[str, str]) -> bool:
        """Whether a message belongs to this submission, not to an earlier one of the same id."""
        submission = submission_of(message_headers)
        return self.submission is None or submission is None or submission >= self.submission


class _Error(msgspec.Struct):
    code: int = 500
    description: str = "unknown error"


class _Ack(msgspec.Struct):
    seq: int = 0
    duplicate: bool = False
    error: _Error | None = None


async def publish_job(
    bus: Bus, subject: str, data: bytes, message_headers: Mapping[str, str]
) -> tuple[int, bool]:
    """Stores a job; returns its sequence, and whether it was there already.

    What was not acknowledged is sent again; its `Nats-Msg-Id` keeps it from being stored twice.

    Raises:
        PayloadTooLarge: Over the server's limit; nothing was sent.
        Overloaded: The queue is full, or this owner's part of it; try again later.
        BusUnavailable: No NATS stream accepted it, or the acknowledgement did not arrive.
    """
    for attempt in range(RETRIES + 1):
        last_try = attempt == RETRIES
        try:
            message = await bus.request(subject, data, message_headers)
        except NoResponders:
            if last_try:
                raise BusUnavailable("no stream takes jobs: has a worker been started?") from None
        except NotPermitted:
            raise
        except BusUnavailable:
            if last_try:
                raise
        else:
            ack = _acknowledgement(message)
            if ack.error is None:
                return ack.seq, ack.duplicate and attempt == 0
            if "per subject exceeded" in ack.error.description:
                raise Overloaded("the job was not accepted: its owner has as many open jobs as it may")
            if "exceeded" in ack.error.description:
                raise Overloaded(f"the job was not accepted: the queue is full: {ack.error.description}")
            if last_try or ack.error.code != 503:
                raise BusUnavailable(f"the job was not accepted: {ack.error.description}")
        await asyncio.sleep(RETRY_PAUSE)
    raise AssertionError("unreachable")


async def publish_cancel(bus: Bus, job: JobHandle) -> None:
    """Asks for a job to be stopped wherever it is, also while it is queued.

    Raises:
        BusUnavailable: The server did not take it.
    """
    only = {} if job.submission is None else {headers.SUBMISSION: str(job.submission)}
    await bus.store(bus.subjects.cancel(job.owner, job.id), b"", only)


def _acknowledgement(message: Message) -> _Ack:
    try:
        return msgspec.json.decode(message.data, type=_Ack)
    except msgspec.DecodeError:
        raise BusUnavailable("the answer to the job is not an acknowledgement of a stream") from None
