"""The condition of a fleet: streams that are missing or full, lost consumers, workers that do not match."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec

from inferbus.schemas.errors import BusUnavailable
from inferbus.schemas.fleet import WorkerInfo
from inferbus.schemas.subjects import CLASSES, JobClass
from inferbus.workers.bus.connection.bus import Bus
from inferbus.workers.bus.errors import NOT_FOUND, ApiError
from inferbus.workers.bus.fleet.unlike import unlike
from inferbus.workers.bus.jetstream import browse, layout

NEARLY_FULL: Final = 0.8
"""The share of a stream's limit from which a warning is due."""

FULL: Final = 0.95
"""The share from which large messages no longer fit."""

_REFUSE: Final = {
    layout.JOBS: "jobs are refused",
    layout.RESULTS: "results have no room",
    layout.DEAD: "dead letters have no room",
    layout.CANCEL: "cancels are refused",
    layout.OBJECTS: "bodies over the payload limit are refused",
}
"""The streams that refuse what does not fit, and what that means; the others discard what is old."""


class Trouble(msgspec.Struct, frozen=True, kw_only=True):
    """Something that is wrong, or soon will be.

    Attributes:
        text: One line.
        serious: Whether jobs cannot be served because of it.
    """

    text: str
    serious: bool


class Condition(msgspec.Struct, frozen=True, kw_only=True):
    """How a fleet is.

    Attributes:
        troubles: What is wrong.
        room: Bytes used and allowed, of each stream that refuses what does not fit.
    """

    troubles: list[Trouble]
    room: dict[str, tuple[int, int]]


async def examine(bus: Bus, workers: Sequence[WorkerInfo]) -> Condition:
    """The condition of a fleet, as far as the user may look at its streams and consumers.

    Args:
        bus: The connection.
        workers: Those that are announced.
    """
    troubles: list[Trouble] = []
    room: dict[str, tuple[int, int]] = {}
    for stream in (layout.JOBS, layout.STREAM, layout.RESULTS, layout.CANCEL, layout.DEAD, layout.OBJECTS):
        try:
            info = await browse.stream_info(bus, stream)
        except ApiError as error:
            if error.status == NOT_FOUND:
                troubles.append(Trouble(text=f"the stream {stream} is missing", serious=True))
            continue
        except BusUnavailable:
            continue
        limit = info["config"].get("max_bytes", layout.UNLIMITED)
        if stream in _REFUSE and limit > 0:
            room[stream] = (info["state"]["bytes"], limit)
        if stream == layout.JOBS:
            troubles.extend(await _consumers(bus, workers))
    for stream, (used, limit) in room.items():
        troubles.extend(_full(stream, used, limit))
    troubles.extend(_stuck(workers))
    troubles.extend(Trouble(text=line, serious=False) for line in unlike(workers))
    return Condition(troubles=troubles, room=room)


def _full(stream: str, used: int, limit: int) -> list[Trouble]:
    if used < NEARLY_FULL * limit:
        return []
    full = used >= FULL * limit
    text = f"the stream {stream} is {'full' if full else 'nearly full'}: {used} of {limit} bytes"
    return [Trouble(text=f"{text}; {_REFUSE[stream]}" if full else text, serious=full)]


def _stuck(workers: Sequence[WorkerInfo]) -> list[Trouble]:
    """Ready workers that say why they take no jobs: an answer may not fit a stream that is not full."""
    return [
        Trouble(text=f"the worker {info.worker} takes no jobs: {info.reason}", serious=True)
        for info in workers
        if info.state == "ready" and info.reason
    ]


async def _consumers(bus: Bus, workers: Sequence[WorkerInfo]) -> list[Trouble]:
    wanted: set[tuple[str, JobClass]] = {
        (info.model, job_class)
        for info in workers
        if info.state == "ready"
        for job_class in CLASSES
        if job_class in info.classes
    }
    try:
        present = {each["name"] for each in await browse.consumers(bus, layout.JOBS)}
    except BusUnavailable:
        return []
    return [
        Trouble(
            text=f"the consumer {name} is missing: no {job_class} job of {model} is delivered",
            serious=True,
        )
        for model, job_class in sorted(wanted)
        if (name := layout.durable(model, job_class)) not in present
    ]
