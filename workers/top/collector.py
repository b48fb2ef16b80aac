"""Reads a fleet's state from NATS: announcements, service statistics, queues, batches, dead letters.

One reading is about ten requests to the server, one question that every worker answers once, and every
`OLDEST_EVERY` seconds one job of each queue, for its age. It writes nothing.
"""

from __future__ import annotations

import time
from contextlib import aclosing
from typing import Any, Final

import msgspec

from inferbus.schemas import codec
from inferbus.schemas.errors import BusUnavailable, CallerError
from inferbus.schemas.fleet import WorkerInfo
from inferbus.schemas.subjects import escape
from inferbus.workers.batch.state import ENDED, Record
from inferbus.workers.bus.errors import NOT_FOUND, ApiError
from inferbus.workers.bus.fleet.condition import examine
from inferbus.workers.bus.fleet.services import PREFIX
from inferbus.workers.bus.jetstream import browse, layout
from inferbus.workers.bus.jetstream.client import JetStream
from inferbus.workers.client import Client
from inferbus.workers.client.operator import Operator
from inferbus.workers.client.records import Queue
from inferbus.workers.top.snapshot import BatchLine, Ended, QueueLine, Snapshot, rated

ANSWER: Final = 0.5
"""Seconds without an answer after which no further worker tells its statistics."""

OLDEST_EVERY: Final = 10.0
"""Seconds between two looks at the oldest job of a queue: the server sends its body, too."""


class Collector:
    """Takes one snapshot after another.

    Args:
        client: Connected; what its user may not look at stays empty.
    """

    def __init__(self, client: Client) -> None:
        self._client = client
        self._bus = client.bus
        self._before: Snapshot | None = None
        self._oldest: dict[str, float] = {}
        self._looked = float("-inf")

    async def snapshot(self) -> Snapshot:
        """The fleet now, with the rates since the snapshot before.

        Raises:
            BusUnavailable: The announcements cannot be read.
        """
        workers = await self._client.workers()
        now = Snapshot(at=time.monotonic(), workers=workers)
        for what, read in (
            ("statistics of workers", self._statistics),
            ("queues", self._queues),
            ("batches", self._batches),
            ("dead letters", self._dead),
        ):
            try:
                await read(now)
            except BusUnavailable as error:
                # Streams that are missing are told as troubles, and there may be no batches at all.
                if not (isinstance(error, ApiError) and error.status == NOT_FOUND):
                    now.hidden.append(what)
        now.troubles = [each.text for each in (await examine(self._bus, workers)).troubles]
        before, self._before = self._before, now
        return now if before is None else rated(before, now)

    async def _statistics(self, now: Snapshot) -> None:
        """Asks every worker once; one that is slow, or starts, is left out."""
        waited = {escape(info.worker): info.worker for info in now.workers if info.state != "failed"}
        if not waited:
            return
        now.at = time.monotonic()
        async with aclosing(self._bus.ask(f"{PREFIX}.STATS", timeout=ANSWER)) as answers:
            try:
                async for message in answers:
                    told: dict[str, Any] = msgspec.json.decode(message.data)
                    if (worker := waited.pop(told.get("id", ""), None)) is not None:
                        now.ended[worker] = _ended(told)
                    if not waited:
                        return
            except msgspec.DecodeError:
                return
            except BusUnavailable:
                if not now.ended:
                    raise

    async def _queues(self, now: Snapshot) -> None:
        queues = await Operator(self._bus).queues()
        if time.monotonic() - self._looked >= OLDEST_EVERY:
            self._looked = time.monotonic()
            self._oldest = {each.consumer: await self._submitted(each) for each in queues if _open(each)}
        for each in queues:
            since = self._oldest.get(each.consumer)
            now.queues.append(
                QueueLine(
                    model=each.model,
                    job_class=each.job_class,
                    pending=each.pending,
                    taken=each.ack_pending,
                    redelivered=each.redelivered,
                    pulls=each.waiting,
                    oldest=max(0.0, time.time() - since) if since and _open(each) else None,
                    paused=each.paused_until is not None,
                )
            )

    async def _submitted(self, queue: Queue) -> float:
        """When the oldest job of a queue was submitted, in Unix seconds; 0: there is none."""
        subject = self._bus.subjects.jobs_of(queue.model, queue.job_class)
        page, _ = await JetStream(self._bus).page(layout.JOBS, subject, batch=1)
        return page[0].time.timestamp() if page else 0.0

    async def _batches(self, now: Snapshot) -> None:
        for stored in await JetStream(self._bus).read(
            layout.BATCHES, layout.key(self._bus.subjects, layout.BATCHES, "*.*.state")
        ):
            try:
                record = codec.decode(stored.data, Record)
            except CallerError:
                continue  # Removed, or of another version.
            if record.status not in ENDED:
                now.batches.append(_batch(record))

    async def _dead(self, now: Snapshot) -> None:
        now.dead = (await browse.stream_info(self._bus, layout.DEAD))["state"]["messages"]


def total(workers: list[WorkerInfo]) -> tuple[int, int]:
    """Slots in use, and all slots, of workers that are ready."""
    ready = [info.load for info in workers if info.state == "ready"]
    return sum(load.busy for load in ready), sum(load.slots for load in ready)


def _open(queue: Queue) -> bool:
    return queue.pending + queue.ack_pending > 0


def _ended(told: dict[str, Any]) -> Ended:
    endpoints = told.get("endpoints") or []
    return Ended(
        requests=sum(each["num_requests"] for each in endpoints),
        errors=sum(each["num_errors"] for each in endpoints),
        seconds=sum(each["processing_time"] for each in endpoints) / 1e9,
    )


def _batch(record: Record) -> BatchLine:
    counts = record.counts
    return BatchLine(
        id=record.id,
        owner=record.owner,
        model=record.model,
        status=record.status,
        lines=record.source.lines,
        ended=counts.ended,
        failed=counts.ended - counts.succeeded,
        tokens=record.usage.output_tokens,
        rate=record.rate,
    )
