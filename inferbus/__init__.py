"""Message-queue driven batch inference: SGLang prefill and decode workers on NATS.

The names that a program needs to use inferbus. Each is imported on first use, so that `import inferbus` is
free, and a program that only checks messages (`inferbus.schemas`) needs msgspec alone.
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
    from inferbus.workers.batch.frames import batch_frame
    from inferbus.workers.batch.rows import batch
    from inferbus.workers.client import (
        Answer,
        AnswerLost,
        AnswerStream,
        Chunk,
        Client,
        ConnectionLost,
        FinalStatus,
        Job,
        JobIdUsed,
        JobNotFound,
        JobStream,
        LiveStream,
        Message,
        Restarted,
        Result,
        Stats,
        SyncClient,
        SyncStream,
        TimedOut,
        ToolCall,
        WorkerLost,
        message,
        text,
    )
    from inferbus.workers.config import BusSettings

__all__ = [
    "Answer",
    "AnswerLost",
    "AnswerStream",
    "BusSettings",
    "CallerError",
    "Chunk",
    "Client",
    "ConnectionLost",
    "Ended",
    "FinalStatus",
    "InferbusError",
    "InfrastructureError",
    "Job",
    "JobClass",
    "JobIdUsed",
    "JobNotFound",
    "JobStream",
    "Kind",
    "LiveStream",
    "Message",
    "Restarted",
    "Result",
    "Sampling",
    "Stats",
    "SyncClient",
    "SyncStream",
    "TimedOut",
    "ToolCall",
    "WorkerError",
    "WorkerInfo",
    "WorkerLost",
    "batch",
    "batch_frame",
    "message",
    "text",
]

_MODULES: Final = {
    "BusSettings": "inferbus.workers.config",
    "JobClass": "inferbus.schemas.subjects",
    "Kind": "inferbus.schemas.subjects",
    "Sampling": "inferbus.schemas.sampling",
    "WorkerInfo": "inferbus.schemas.fleet",
    "batch": "inferbus.workers.batch.rows",
    "batch_frame": "inferbus.workers.batch.frames",
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
