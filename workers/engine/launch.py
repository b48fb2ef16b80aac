"""Starts a worker's engine."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from inferbus.schemas.fleet import Role
from inferbus.workers.config import WorkerSettings
from inferbus.workers.engine.interface import Engine
from inferbus.workers.engine.progress import Progress

SCRIPTED: Final = "scripted"
UNKNOWN: Final = "unknown"


async def launch(
    role: Role, settings: WorkerSettings, argv: Sequence[str], scripted: Path | None, progress: Progress
) -> Engine:
    """The engine, ready.

    Args:
        role: Of the worker.
        settings: Model name, bootstrap address, prefill timeout, trust.
        argv: SGLang's own flags.
        scripted: A script to replay instead; no SGLang is loaded then.
        progress: Told what is being done.

    Raises:
        InferbusError: It cannot be started; the message is the reason in one line.
    """
    if scripted is not None:
        from inferbus.workers.engine.scripted import ScriptedEngine, load

        return ScriptedEngine(load(scripted), role=role, model=settings.model or SCRIPTED)
    from inferbus.workers.engine.sglang import SGLangEngine

    return await SGLangEngine.launch(
        argv,
        role=role,
        model=settings.model,
        bootstrap_port=settings.bootstrap_port,
        advertise_host=settings.bootstrap_host,
        transfer_timeout=settings.prefill_timeout,
        trust_grammars=settings.trust_grammars,
        progress=progress,
    )


def model_name(settings: WorkerSettings, argv: Sequence[str], scripted: Path | None) -> str:
    """The name that a model will be served under, as far as the options tell before the engine reads them.

    The flags are read here as well because importing SGLang, whose parser is the one that counts, takes long.
    """
    if settings.model or scripted is not None:
        return settings.model or SCRIPTED
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--served-model-name")
    parser.add_argument("--model-path", "--model")
    try:
        found, _ = parser.parse_known_args(list(argv))
    except argparse.ArgumentError:
        return UNKNOWN
    return found.served_model_name or found.model_path or UNKNOWN
