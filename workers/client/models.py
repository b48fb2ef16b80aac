"""Which models are served, or were ever."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from inferbus.schemas.errors import BusUnavailable
from inferbus.schemas.fleet import WorkerInfo
from inferbus.schemas.subjects import CLASSES, JobClass
from inferbus.workers.bus.connection.bus import Bus
from inferbus.workers.bus.errors import CONSUMER_NOT_FOUND, STREAM_NOT_FOUND, ApiError
from inferbus.workers.bus.jetstream import layout
from inferbus.workers.bus.jetstream.client import JetStream


def serving(workers: Iterable[WorkerInfo]) -> list[str]:
    """The models that a ready worker answers requests for."""
    return sorted({info.model for info in workers if info.state == "ready" and info.kinds})


def of_its_model(name: str, served: Iterable[str]) -> str:
    """The model of a name that may be `model:adapter`; the name itself, where nobody serves such a model."""
    known = frozenset(served)
    bases = (each for each in known if name.startswith(f"{each}:"))
    return name if name in known else max(bases, key=len, default=name)


def unserved(model: str, served: Iterable[str]) -> str:
    """One line about a model that no worker serves."""
    names = ", ".join(served)
    return f"no worker serves the model {model!r}; " + (
        f"served are: {names}" if names else "no worker is ready, see `inferbus workers`"
    )


async def never_served(bus: Bus, model: str, classes: Sequence[JobClass] = CLASSES) -> bool:
    """Whether no worker has ever taken jobs of a model and these classes, as far as the user may know.

    The first worker of a model creates its consumers, which stay.
    """
    for job_class in classes:
        try:
            await JetStream(bus).call(f"CONSUMER.INFO.{layout.JOBS}.{layout.durable(model, job_class)}")
            return False
        except ApiError as error:
            if error.err_code not in (CONSUMER_NOT_FOUND, STREAM_NOT_FOUND):
                return False
        except BusUnavailable:
            return False
    return True
