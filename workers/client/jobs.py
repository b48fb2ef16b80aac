"""Durable jobs: naming one, handing it in, stopping it."""

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
from inferbus.workers.client.messages import submission

RETRIES: Final = 2
RETRY_PAUSE: Final = 0.25
"""ADR-22: a publish that finds no stream is tried twice more."""


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """A submitted job.

    Attributes:
        id: Its id; unique for its owner.
        owner: Who submitted it.
        submission: The stream sequence of the submission; None for a job that is known by its id alone.
        duplicate: Whether it had been submitted before, and this submission was dropped.
    """

    id: str
    owner: str
    submission: int | None = None
    duplicate: bool = False

    def answered_by(self, found: Mapping[str, str]) -> bool:
        """Whether a message is for this job: not for an earlier submission under the same id."""
        named = submission(found)
        return self.submission is None or named is None or named >= self.submission


class _Error(msgspec.Struct):
    code: int = 500
    description: str = "unknown error"


class _Ack(msgspec.Struct):
    seq: int = 0
    duplicate: bool = False
    error: _Error | None = None


async def hand_in(bus: Bus, subject: str, data: bytes, found: Mapping[str, str]) -> tuple[int, bool]:
    """Stores a job; returns its stream sequence, and whether it was there already.

    What was not acknowledged is sent again; its `Nats-Msg-Id` keeps it from being stored twice.

    Raises:
        PayloadTooLarge: Over the server's limit; nothing was sent.
        Overloaded: The queue is full, or this owner's part of it; try again later.
        BusUnavailable: No stream took it: it was not accepted; or NATS did not say so.
    """
    for attempt in range(RETRIES + 1):
        last_try = attempt == RETRIES
        try:
            message = await bus.request(subject, data, found)
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


def _acknowledgement(message: Message) -> _Ack:
    try:
        return msgspec.json.decode(message.data, type=_Ack)
    except msgspec.DecodeError:
        raise BusUnavailable("something else than a stream takes jobs") from None


async def stop(bus: Bus, job: Job) -> None:
    """Asks for a job to be stopped wherever it is, also while it is queued.

    Raises:
        BusUnavailable: The server did not take it.
    """
    aim = {} if job.submission is None else {headers.SUBMISSION: str(job.submission)}
    await bus.store(bus.subjects.cancel(job.owner, job.id), b"", aim)
