"""Durable jobs: naming, submitting and cancelling one."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from inferbus.schemas import headers
from inferbus.schemas.errors import BusUnavailable, Overloaded
from inferbus.workers.bus.connection.bus import Bus
from inferbus.workers.bus.errors import ApiError, NoResponders, StreamFull, SubjectFull
from inferbus.workers.bus.interface import PubAck
from inferbus.workers.bus.jetstream.client import JetStream
from inferbus.workers.client.messages import submission_of


class Job(msgspec.Struct, frozen=True, kw_only=True):
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


async def publish_job(bus: Bus, subject: str, data: bytes, message_headers: Mapping[str, str]) -> PubAck:
    """Stores a job.

    It is sent again where no acknowledgement comes; its `Nats-Msg-Id` keeps it from being stored twice.

    Raises:
        PayloadTooLarge: Over the server's limit; nothing was sent.
        Overloaded: The queue is full, or this owner's part of it; try again later.
        BusUnavailable: No NATS stream accepted it, or the acknowledgement did not arrive.
    """
    try:
        return await JetStream(bus).store(subject, data, message_headers, resend=True)
    except NoResponders:
        raise BusUnavailable("no stream takes jobs: has a worker been started?") from None
    except SubjectFull:
        raise Overloaded("the job was not accepted: its owner has as many open jobs as it may") from None
    except StreamFull as error:
        raise Overloaded(f"the job was not accepted: the queue is full: {error.description}") from None
    except ApiError as error:
        raise BusUnavailable(f"the job was not accepted: {error.description}") from None


async def publish_cancel(bus: Bus, job: Job) -> None:
    """Asks for a job to be stopped wherever it is, also while it is queued.

    Raises:
        BusUnavailable: The server did not take it.
    """
    only = {} if job.submission is None else {headers.SUBMISSION: str(job.submission)}
    await JetStream(bus).store(bus.subjects.cancel(job.owner, job.id), b"", only)
