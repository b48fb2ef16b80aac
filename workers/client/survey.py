"""Whether the streams and consumers that are there are as the settings ask for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from inferbus.schemas.subjects import JobAddress
from inferbus.workers.bus.connection.bus import Bus
from inferbus.workers.bus.durations import seconds
from inferbus.workers.bus.errors import NOT_FOUND, ApiError
from inferbus.workers.bus.jetstream import browse, layout
from inferbus.workers.bus.jetstream.differences import differences
from inferbus.workers.bus.jetstream.provision import provision
from inferbus.workers.bus.queue.consumers import job_consumers
from inferbus.workers.client.records import Queue, queue_address
from inferbus.workers.config import Settings


class ConsumerState(msgspec.Struct, frozen=True, kw_only=True):
    """A consumer, and how it compares.

    Attributes:
        stream: Of this stream.
        consumer: Its name.
        queue: Whose jobs it gives out, and its numbers; None: it is not one of inferbus's.
        differences: What is weaker than asked for.
    """

    stream: str
    consumer: str
    queue: Queue | None = None
    differences: list[str] = []


class StreamState(msgspec.Struct, frozen=True, kw_only=True):
    """A stream of the contract, and how it compares.

    Attributes:
        stream: Its name.
        there: Whether it exists; nothing else says anything where it does not.
        messages: In it.
        bytes: In it.
        max_bytes: Its limit; -1: none.
        max_age: Seconds; 0: none.
        storage: `file` or `memory`.
        replicas: Copies.
        differences: What is weaker than asked for.
        consumers: That it has.
        unclaimed: Jobs in it that no consumer gives out; more than a moment's worth of them are of a model
            that no worker has been started for, or forgotten by the server (nats-io/nats-server#6905).
    """

    stream: str
    there: bool
    messages: int = 0
    bytes: int = 0
    max_bytes: int = layout.UNLIMITED
    max_age: float = 0.0
    storage: str = ""
    replicas: int = 0
    differences: list[str] = []
    consumers: list[ConsumerState] = []
    unclaimed: int = 0

    @property
    def fine(self) -> bool:
        """Whether it is there, and it and its consumers are as asked for."""
        return self.there and not self.differences and not any(each.differences for each in self.consumers)


async def survey(bus: Bus, settings: Settings) -> list[StreamState]:
    """Every stream of the contract with its consumers; see `Operator.streams`."""
    return [
        await _stream(bus, each, settings) for each in layout.stream_configs(bus.subjects, settings.streams)
    ]


async def adopt(bus: Bus, settings: Settings, found: Sequence[StreamState]) -> None:
    """Raises what was found to be weaker, and makes what is missing; see `Operator.adopt`."""
    await provision(bus, settings.streams, adopt=True)
    weaker = [each for stream in found for each in stream.consumers if each.differences]
    for queue in (each.queue for each in weaker if each.queue is not None):
        await job_consumers(
            bus,
            queue.model,
            [queue.job_class],
            ack_wait=settings.worker.ack_wait,
            adopt=True,
        )


async def _stream(bus: Bus, wanted: dict[str, Any], settings: Settings) -> StreamState:
    name = wanted["name"]
    try:
        info = await browse.stream_info(bus, name)
    except ApiError as error:
        if error.status != NOT_FOUND:
            raise
        return StreamState(stream=name, there=False)
    found, state = info["config"], info["state"]
    consumers = await browse.consumers(bus, name) if state["consumer_count"] else []
    claimed = sum(each["num_pending"] + each["num_ack_pending"] for each in consumers)
    return StreamState(
        stream=name,
        there=True,
        messages=state["messages"],
        bytes=state["bytes"],
        max_bytes=found.get("max_bytes", layout.UNLIMITED),
        max_age=seconds(found.get("max_age", 0)),
        storage=found["storage"],
        replicas=found["num_replicas"],
        differences=differences(wanted, found),
        consumers=[_consumer(bus, name, each, settings) for each in consumers],
        unclaimed=max(0, state["messages"] - claimed) if name == layout.JOBS else 0,
    )


def _consumer(bus: Bus, stream: str, info: dict[str, Any], settings: Settings) -> ConsumerState:
    config, name = info["config"], info["name"]
    address: JobAddress | None = None
    if stream == layout.JOBS:
        address = queue_address(config.get("filter_subject", ""), bus.subjects)
    if address is None or name != layout.durable(address.model, address.job_class):
        return ConsumerState(stream=stream, consumer=name)
    wanted = layout.job_consumer(
        bus.subjects,
        address.model,
        address.job_class,
        ack_wait=settings.worker.ack_wait,
    )
    return ConsumerState(
        stream=stream,
        consumer=name,
        queue=Queue.of(info, bus.subjects),
        differences=differences(wanted, config),
    )
