"""Compares the NATS streams and consumers of a server with the settings."""

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
from inferbus.workers.bus.jetstream.provision import Report, provision
from inferbus.workers.bus.queue.consumers import job_consumers
from inferbus.workers.client.records import Queue, queue_address
from inferbus.workers.config import Settings


class ConsumerState(msgspec.Struct, frozen=True, kw_only=True):
    """A consumer of a NATS stream, compared with the settings.

    Attributes:
        stream: Name of its NATS stream.
        consumer: Its name.
        queue: The queue that it delivers; None: it was not created by inferbus.
        differences: Settings that are weaker than asked for.
    """

    stream: str
    consumer: str
    queue: Queue | None = None
    differences: list[str] = []


class StreamState(msgspec.Struct, frozen=True, kw_only=True):
    """A NATS stream of the contract, compared with the settings.

    Attributes:
        stream: Its name.
        exists: Whether it exists; if not, the other attributes mean nothing.
        messages: Number of messages.
        bytes: Size of all messages.
        max_bytes: Limit of that; -1: none.
        max_age: Seconds; 0: none.
        storage: `file` or `memory`.
        replicas: Number of copies.
        differences: Settings that are weaker than asked for.
        consumers: Its consumers.
        unclaimed: Jobs in it that no consumer delivers. If they stay, they are for a model that no worker was
            ever started for, or the server has lost them (nats-io/nats-server#6905).
    """

    stream: str
    exists: bool
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
        """Whether it exists, and it and its consumers are as asked for."""
        return self.exists and not self.differences and not any(each.differences for each in self.consumers)


async def survey(bus: Bus, settings: Settings) -> list[StreamState]:
    """Every NATS stream of the contract with its consumers; see `Operator.streams`."""
    return [
        await _stream(bus, each, settings) for each in layout.stream_configs(bus.subjects, settings.streams)
    ]


async def adopt(
    bus: Bus,
    settings: Settings,
    states: Sequence[StreamState],
    *,
    lower_replicas: bool,
    report: Report,
) -> None:
    """Creates what is missing, and raises what is weaker; see `Operator.adopt`."""
    await provision(bus, settings.streams, adopt=True, lower_replicas=lower_replicas, report=report)
    for each in (consumer for state in states for consumer in state.consumers if consumer.differences):
        if (queue := each.queue) is None:
            continue
        await job_consumers(
            bus,
            queue.model,
            [queue.job_class],
            ack_wait=settings.worker.ack_wait,
            adopt=True,
        )
        report(f"consumer {each.consumer}: raised, since {'; '.join(each.differences)}")


async def _stream(bus: Bus, wanted: dict[str, Any], settings: Settings) -> StreamState:
    name = wanted["name"]
    try:
        info = await browse.stream_info(bus, name)
    except ApiError as error:
        if error.status != NOT_FOUND:
            raise
        return StreamState(stream=layout.in_account(name, bus.subjects), exists=False)
    config, state = info["config"], info["state"]
    consumers = await browse.consumers(bus, name) if state["consumer_count"] else []
    claimed = sum(each["num_pending"] + each["num_ack_pending"] for each in consumers)
    return StreamState(
        stream=layout.in_account(name, bus.subjects),
        exists=True,
        messages=state["messages"],
        bytes=state["bytes"],
        max_bytes=config.get("max_bytes", layout.UNLIMITED),
        max_age=seconds(config.get("max_age", 0)),
        storage=config["storage"],
        replicas=config["num_replicas"],
        differences=differences(wanted, config),
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
