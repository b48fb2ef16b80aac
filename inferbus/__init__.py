"""Message-queue driven batch inference: SGLang prefill and decode workers on NATS.

This is what a program that uses inferbus needs. Each name is imported when it is first used, so
`import inferbus` costs nothing, and what only checks messages (`inferbus.schemas`) needs msgspec alone.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from inferbus.schemas.errors import (
        CallerError,
        Ended,
        InferbusError,
        InfrastructureError,
        WorkerError,
    )
    from inferbus.schemas.fleet import WorkerInfo
    from inferbus.schemas.sampling import Sampling
    from inferbus.schemas.subjects import JobClass, Kind
    from inferbus.workers.client import (
        Answer,
        AnswerLost,
        Chunk,
        Client,
        Job,
        JobStream,
        LiveStream,
        Restarted,
        Result,
        Stats,
        Stream,
        TimedOut,
        WorkerLost,
    )
    from inferbus.workers.config import BusSettings

__all__ = [
    "Answer",
    "AnswerLost",
    "BusSettings",
    "CallerError",
    "Chunk",
    "Client",
    "Ended",
    "InferbusError",
    "InfrastructureError",
    "Job",
    "JobClass",
    "JobStream",
    "Kind",
    "LiveStream",
    "Restarted",
    "Result",
    "Sampling",
    "Stats",
    "Stream",
    "TimedOut",
    "WorkerError",
    "WorkerInfo",
    "WorkerLost",
]

_MODULES: Final = {
    "BusSettings": "inferbus.workers.config",
    "JobClass": "inferbus.schemas.subjects",
    "Kind": "inferbus.schemas.subjects",
    "Sampling": "inferbus.schemas.sampling",
    "WorkerInfo": "inferbus.schemas.fleet",
    **dict.fromkeys(
        ("CallerError", "Ended", "InferbusError", "InfrastructureError", "WorkerError"),
        "inferbus.schemas.errors",
    ),
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_MODULES.get(name, "inferbus.workers.client")), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
