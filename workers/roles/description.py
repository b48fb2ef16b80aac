"""What a worker announces of itself: in the registry, and in the services API."""

from __future__ import annotations

import functools
import secrets
import socket
import time
from importlib.metadata import version
from typing import Any

import msgspec

from inferbus.schemas.fleet import Load, Role, WorkerInfo
from inferbus.schemas.subjects import Subjects
from inferbus.workers.admission import Admission
from inferbus.workers.bus.connection.bus import Bus
from inferbus.workers.bus.fleet.services import Service
from inferbus.workers.config import WorkerSettings
from inferbus.workers.engine.interface import Engine, EngineInfo
from inferbus.workers.roles.program import Program


class Description:
    """Of one worker.

    Args:
        role: Of the worker.
        settings: Of the worker.
        model: Its name, as far as it is known before the engine is up.
    """

    def __init__(self, role: Role, settings: WorkerSettings, model: str) -> None:
        self._model = model
        self._classes = list(settings.classes)
        self._info = functools.partial(
            WorkerInfo,
            worker=settings.worker,
            role=role,
            version=version("inferbus"),
            host=socket.gethostname(),
            started=time.time(),
            incarnation=secrets.token_hex(8),
        )

    def loading(self) -> WorkerInfo:
        """Its announcement before its engine is up."""
        info: WorkerInfo = self._info(
            state="starting",
            model=self._model,
            kinds=[],
            tokenizer=False,
            engine="",
            load=Load(slots=0),
        )
        return info

    def loaded(self, engine: EngineInfo, admission: Admission) -> WorkerInfo:
        """Its announcement once the engine is up."""
        info: WorkerInfo = self._info(
            state="starting",
            model=engine.model,
            kinds=list(engine.kinds),
            classes=self._classes if engine.kinds else [],
            tokenizer=engine.tokenizer,
            engine=engine.name,
            load=Load(slots=admission.budget.slots),
            capacity=engine.capacity,
            signature=engine.signature,
            bootstrap=engine.bootstrap,
        )
        return info


async def load(engine: Engine, admission: Admission) -> Load:
    """How busy a worker is."""
    now = await engine.load()
    return Load(
        slots=admission.budget.slots,
        busy=admission.busy,
        running=now.running,
        waiting=now.waiting,
        kv_used=now.kv_used,
        kv_forecast=admission.kv_forecast,
        queued=admission.queued,
    )


def service(bus: Bus, info: WorkerInfo, program: Program, *, replies: tuple[str, ...]) -> Service:
    """A worker as a NATS service.

    Args:
        bus: Connected.
        info: As announced.
        program: What it serves.
        replies: Prefixes of subjects that answers may go to.
    """
    capacity: dict[str, Any] = msgspec.to_builtins(info.capacity) if info.capacity else {}
    metadata = {"role": info.role, "model": info.model, "engine": info.engine}
    return Service(
        bus,
        name=f"{_service_name(bus.subjects)}-{info.role}",
        id=info.worker,
        version=info.version,
        description=f"{info.role} worker of {info.model}",
        metadata=metadata | {name: str(value) for name, value in capacity.items()},
        endpoints=program.endpoints,
        replies=replies,
    )


def _service_name(subjects: Subjects) -> str:
    """What the services of one deployment are called; with a prefix of its own it shows it."""
    own = "" if subjects == Subjects() else f"-{subjects.prefix.replace('.', '-')}"
    return f"inferbus{own}"
