"""Starts a worker's engine."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from inferbus.schemas.fleet import Role
from inferbus.workers.config import WorkerSettings
from inferbus.workers.engine.interface import Engine


async def launch(role: Role, settings: WorkerSettings, argv: Sequence[str], scripted: Path | None) -> Engine:
    """The engine, ready.

    Args:
        role: Of the worker.
        settings: Model name, bootstrap address, prefill timeout.
        argv: SGLang's own flags.
        scripted: A script to replay instead; no SGLang is loaded then.

    Raises:
        InferbusError: It cannot be started; the message is the reason in one line.
    """
    if scripted is not None:
        from inferbus.workers.engine.scripted import ScriptedEngine, load

        return ScriptedEngine(load(scripted), role=role, model=settings.model or "scripted")
    from inferbus.workers.engine.sglang import SGLangEngine

    return await SGLangEngine.launch(
        argv,
        role=role,
        model=settings.model,
        bootstrap_port=settings.bootstrap_port,
        advertise_host=settings.bootstrap_host,
        transfer_timeout=settings.prefill_timeout,
    )
