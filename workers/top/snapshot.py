"""What a fleet does at one moment, and the rates between two moments."""

from __future__ import annotations

import msgspec

from inferbus.schemas.fleet import WorkerInfo
from inferbus.schemas.subjects import JobClass


class Ended(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker has counted since its start.

    Attributes:
        requests: Requests that ended: live ones, attempts at jobs, and hand-offs.
        errors: Those that failed.
        seconds: Time spent on all of them.
    """

    requests: int = 0
    errors: int = 0
    seconds: float = 0.0


class Rate(msgspec.Struct, frozen=True, kw_only=True):
    """Of late, by the second.

    Attributes:
        requests: Requests that ended.
        errors: Those that failed.
        latency: Mean seconds of one; None where none ended.
    """

    requests: float
    errors: float
    latency: float | None


class QueueLine(msgspec.Struct, frozen=True, kw_only=True):
    """The jobs of one model and class.

    Attributes:
        model: Of the jobs.
        job_class: Of the jobs.
        pending: Not taken yet.
        taken: Running, or waiting for their next attempt.
        redelivered: Of those, how many were delivered more than once.
        pulls: Open requests of workers with room.
        oldest: Seconds since the oldest job that has not ended was submitted; None where there is none.
        paused: Whether nothing is delivered.
    """

    model: str
    job_class: JobClass
    pending: int
    taken: int
    redelivered: int
    pulls: int
    oldest: float | None
    paused: bool


class BatchLine(msgspec.Struct, frozen=True, kw_only=True):
    """One batch that has not ended.

    Attributes:
        id: Unique for its owner.
        owner: Whose.
        model: The served model.
        status: As in OpenAI's API.
        lines: Of the input.
        ended: Lines that have an answer or an error.
        failed: Lines that have an error.
        tokens: Of all answers so far.
        rate: Lines a second, of late, as its process says.
    """

    id: str
    owner: str
    model: str
    status: str
    lines: int
    ended: int
    failed: int
    tokens: int
    rate: float


class Snapshot(msgspec.Struct, kw_only=True):
    """A fleet at one moment.

    Attributes:
        at: Seconds of the monotonic clock.
        workers: As announced.
        ended: By worker, as far as they answered.
        rates: By worker, since the snapshot before; empty in the first one.
        queues: Of every model and class.
        batches: That have not ended.
        tokens: Of batches, per second since the snapshot before; None in the first one.
        dead: Dead letters; None where this user may not count them.
        troubles: What is wrong, one line each.
        hidden: What this user may not look at.
    """

    at: float
    workers: list[WorkerInfo] = []
    ended: dict[str, Ended] = {}
    rates: dict[str, Rate] = {}
    queues: list[QueueLine] = []
    batches: list[BatchLine] = []
    tokens: float | None = None
    dead: int | None = None
    troubles: list[str] = []
    hidden: list[str] = []


def rated(before: Snapshot, now: Snapshot) -> Snapshot:
    """The later of two snapshots, with the rates between them."""
    seconds = now.at - before.at
    if seconds <= 0:
        return now
    rates = {
        worker: _rate(before.ended[worker], ended, seconds)
        for worker, ended in now.ended.items()
        # A worker that was started again counts from 0.
        if worker in before.ended and ended.requests >= before.ended[worker].requests
    }
    earlier = {(each.owner, each.id): each.tokens for each in before.batches}
    tokens = sum(each.tokens - earlier.get((each.owner, each.id), each.tokens) for each in now.batches)
    return msgspec.structs.replace(now, rates=rates, tokens=max(0, tokens) / seconds)


def _rate(before: Ended, now: Ended, seconds: float) -> Rate:
    requests = now.requests - before.requests
    return Rate(
        requests=requests / seconds,
        errors=max(0, now.errors - before.errors) / seconds,
        latency=(now.seconds - before.seconds) / requests if requests else None,
    )
