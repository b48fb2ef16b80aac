"""The durable consumers of a model's jobs, and the queue that pulls from them."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from inferbus.schemas.subjects import CLASSES, JobClass
from inferbus.workers.bus.connection.bus import Bus
from inferbus.workers.bus.durations import seconds
from inferbus.workers.bus.jetstream import layout
from inferbus.workers.bus.jetstream.models import capture_jobs
from inferbus.workers.bus.jetstream.provision import ensure_consumer
from inferbus.workers.bus.queue.job_queue import JobQueue
from inferbus.workers.bus.queue.pull_requests import PriorityClass
from inferbus.workers.config import WorkerSettings


class Consumer(msgspec.Struct, frozen=True, kw_only=True):
    """A durable consumer as the server has it.

    Attributes:
        stream: Of this stream.
        name: The durable's name.
        ack_wait: Seconds; heartbeats are due three times as often.
    """

    stream: str
    name: str
    ack_wait: float


async def job_consumers(
    bus: Bus, model: str, classes: Sequence[JobClass], *, ack_wait: float, adopt: bool = False
) -> list[Consumer]:
    """One durable consumer per class for a model, shared by all its workers; made where missing.

    The stream of jobs captures the model's jobs from then on.

    Args:
        bus: The connection.
        model: The served model name.
        classes: In this order.
        ack_wait: Seconds.
        adopt: Raise what is weaker, instead of refusing it. Nothing is ever lowered.

    Raises:
        ProvisionError: One is there, but weaker than asked for.
        BusUnavailable: JetStream is off, or a subject is not permitted.
    """
    await capture_jobs(bus, model)
    stream = layout.in_account(layout.JOBS, bus.subjects)
    consumers = []
    for job_class in classes:
        wanted = layout.job_consumer(bus.subjects, model, job_class, ack_wait=ack_wait)
        config = await ensure_consumer(bus, stream, wanted, adopt=adopt)
        name, wait = wanted["durable_name"], config.get("ack_wait", wanted["ack_wait"])
        consumers.append(Consumer(stream=stream, name=name, ack_wait=seconds(wait)))
    return consumers


async def job_queue(bus: Bus, model: str, settings: WorkerSettings) -> JobQueue:
    """The queue of a model's durable jobs, in the classes that this worker serves.

    Raises:
        ProvisionError: A consumer is there, but weaker than asked for.
        BusUnavailable: JetStream is off, or a subject is not permitted.
    """
    names = [name for name in CLASSES if name in settings.classes]

    async def recreate() -> None:
        await job_consumers(bus, model, names, ack_wait=settings.ack_wait)

    async def capture() -> None:
        await capture_jobs(bus, model)

    consumers = await job_consumers(bus, model, names, ack_wait=settings.ack_wait)
    classes = [
        PriorityClass(job_class=name, weight=settings.classes[name], stream=each.stream, durable=each.name)
        for name, each in zip(names, consumers, strict=True)
    ]
    return JobQueue(
        bus,
        classes,
        ack_wait=min(each.ack_wait for each in consumers),
        recreate=recreate,
        capture=capture,
    )
