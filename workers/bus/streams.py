"""The streams and consumers that the contract needs: made where missing, never weakened.

Provisioning may be repeated by every worker at every start. What is there
already and at least as strong as asked for stays as it is; what is weaker is
told, field by field, and changed only on demand (`adopt`), upwards only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import msgspec

from inferbus.schemas.subjects import CLASSES, JobClass
from inferbus.workers.bus import layout
from inferbus.workers.bus.connection import Bus
from inferbus.workers.bus.differences import differences, strengthened
from inferbus.workers.bus.errors import CONSUMER_NOT_FOUND, STREAM_NOT_FOUND, ApiError, ProvisionError
from inferbus.workers.bus.jetstream import api
from inferbus.workers.bus.pull import JobQueue, PriorityClass
from inferbus.workers.config import StreamSettings, WorkerSettings

_IN_USE: Final = frozenset({10058, 10148, 10013})
"""Stream, consumer, consumer of an old server: there already, with another configuration."""


class Consumer(msgspec.Struct, frozen=True, kw_only=True):
    """A durable consumer as the server has it.

    Attributes:
        stream: Of this stream.
        name: The durable's name.
        filter: The subjects that it gets.
        ack_wait: Seconds; heartbeats are due three times as often.
        max_deliver: Attempts, -1 for no limit.
    """

    stream: str
    name: str
    filter: str
    ack_wait: float
    max_deliver: int


async def provision(bus: Bus, settings: StreamSettings, *, adopt: bool = False) -> None:
    """Makes every stream that is missing.

    Args:
        bus: The connection.
        settings: Limits.
        adopt: Raise what is weaker, instead of refusing it. Nothing is ever lowered.

    Raises:
        ProvisionError: Streams are there, but weaker than asked for; names every field of all of them.
        BusUnavailable: JetStream is off, or a subject is not permitted; says which.
    """
    problems: list[str] = []
    for config in layout.stream_configs(bus.subjects, settings):
        name = config["name"]
        found = await _get_or_create(bus, "STREAM", name, config)
        if not (differing := differences(config, found)):
            continue
        if adopt:
            await api(bus, f"STREAM.UPDATE.{name}", strengthened(config, found))
        else:
            problems.append(f"stream {name}: {'; '.join(differing)}")
    if problems:
        raise _refusal(problems)


async def job_consumers(
    bus: Bus,
    model: str,
    classes: Sequence[JobClass],
    *,
    ack_wait: float,
    max_deliver: int,
    adopt: bool = False,
) -> list[Consumer]:
    """One durable consumer per class for a model, shared by all its workers.

    Raises:
        ProvisionError: One is there, but weaker than asked for.
        BusUnavailable: JetStream is off, or a subject is not permitted.
    """
    return [
        await _ensure(
            bus,
            layout.JOBS,
            layout.job_consumer(bus.subjects, model, name, ack_wait=ack_wait, max_deliver=max_deliver),
            adopt=adopt,
        )
        for name in classes
    ]


async def job_queue(bus: Bus, model: str, settings: WorkerSettings) -> JobQueue:
    """The queue of a model's durable jobs, in the classes that this worker serves.

    Raises:
        ProvisionError: A consumer is there, but weaker than asked for.
        BusUnavailable: JetStream is off, or a subject is not permitted.
    """
    classes = [name for name in CLASSES if name in settings.classes]

    async def consumers() -> list[Consumer]:
        return await job_consumers(
            bus,
            model,
            classes,
            ack_wait=settings.ack_wait,
            # Attempts are bounded by the workers, which bury a job that has used them up. At a bound of
            # its own the server would keep the job, and show it to nobody any more (trial A4).
            max_deliver=layout.UNLIMITED,
        )

    async def recreate() -> None:
        await consumers()

    found = await consumers()
    lanes = [
        PriorityClass(
            job_class=name, weight=settings.classes[name], stream=consumer.stream, durable=consumer.name
        )
        for name, consumer in zip(classes, found, strict=True)
    ]
    return JobQueue(bus, lanes, ack_wait=min(each.ack_wait for each in found), recreate=recreate)


async def _ensure(bus: Bus, stream: str, config: dict[str, Any], *, adopt: bool) -> Consumer:
    name = config["durable_name"]
    found = await _get_or_create(bus, "CONSUMER", f"{stream}.{name}", config)
    if differing := differences(config, found):
        if not adopt:
            raise _refusal([f"consumer {name} of {stream}: {'; '.join(differing)}"])
        body = {"stream_name": stream, "config": strengthened(config, found), "action": "update"}
        found = (await api(bus, f"CONSUMER.CREATE.{stream}.{name}", body))["config"]
    return Consumer(
        stream=stream,
        name=name,
        filter=config["filter_subject"],
        ack_wait=found.get("ack_wait", config["ack_wait"]) / layout.NANO,
        max_deliver=found.get("max_deliver", layout.UNLIMITED),
    )


async def _get_or_create(bus: Bus, kind: str, name: str, config: dict[str, Any]) -> dict[str, Any]:
    """The server's configuration of a stream or consumer, which is made if it is not there.

    Asked for before it is made, so that workers need no permission to make what an operator has made.
    """
    try:
        return dict((await api(bus, f"{kind}.INFO.{name}"))["config"])
    except ApiError as error:
        if error.err_code != (STREAM_NOT_FOUND if kind == "STREAM" else CONSUMER_NOT_FOUND):
            raise
    body = config
    if kind == "CONSUMER":
        # The filter is not repeated in the subject, where its wildcards would not be wildcards.
        body = {"stream_name": name.split(".")[0], "config": config, "action": "create"}
    try:
        return dict((await api(bus, f"{kind}.CREATE.{name}", body))["config"])
    except ApiError as error:
        if error.err_code not in _IN_USE:
            raise
        # Another worker was quicker.
        return dict((await api(bus, f"{kind}.INFO.{name}"))["config"])


def _refusal(problems: list[str]) -> ProvisionError:
    return ProvisionError(
        "JetStream holds streams that are weaker than these settings ask for; nothing was changed. "
        "`inferbus streams --adopt` raises them; or change the settings. " + " | ".join(problems)
    )
