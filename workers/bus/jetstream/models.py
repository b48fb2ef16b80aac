"""The models whose jobs the stream of jobs captures.

It captures the known classes and kinds of models that were ever served, and nothing else. So the server
refuses a job of any other model, class or kind at once, instead of storing what no worker takes.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterable
from typing import Final

from inferbus.schemas.errors import BusUnavailable
from inferbus.workers.bus.connection.bus import Bus
from inferbus.workers.bus.jetstream import layout
from inferbus.workers.bus.jetstream.client import JetStream

TRIES: Final = 20
PAUSE: Final = (0.05, 0.2)
"""Seconds before a change is looked at again; longer than another worker takes from reading to writing."""


async def capture_jobs(bus: Bus, model: str) -> None:
    """Has the stream of jobs capture a model's jobs.

    A stream is updated as a whole, and the server has no condition for that. So a change is verified, and
    made again where the change of another worker undid it. A subject that covers a model's is enough.

    Raises:
        BusUnavailable: The stream is not there, or may not be changed; says which.
    """
    jetstream = JetStream(bus)
    for _ in range(TRIES):
        config = (await jetstream.call(f"STREAM.INFO.{layout.JOBS}"))["config"]
        captured = config.get("subjects") or ()
        missing = uncovered(bus.subjects.jobs_captured(model), captured)
        if not missing:
            return
        kept = {each for each in captured if each != layout.no_jobs(bus.subjects)}
        update = config | {"subjects": sorted(kept.union(missing))}
        await jetstream.call(f"STREAM.UPDATE.{layout.JOBS}", update)
        await asyncio.sleep(random.uniform(*PAUSE))  # noqa: S311
    raise BusUnavailable(f"{layout.JOBS} does not keep the subjects of the model {model!r}")


def uncovered(wanted: Iterable[str], captured: Iterable[str]) -> list[str]:
    """The subjects, wildcards among them, that no captured subject covers."""
    return [each for each in wanted if not any(covers(other, each) for other in captured)]


def covers(pattern: str, subject: str) -> bool:
    """Whether every subject that the second one matches is matched by the first."""
    wider, narrower = pattern.split("."), subject.split(".")
    for index, each in enumerate(wider):
        if each == ">":
            return index < len(narrower)
        if index == len(narrower) or narrower[index] == ">" or each not in ("*", narrower[index]):
            return False
    return len(wider) == len(narrower)
