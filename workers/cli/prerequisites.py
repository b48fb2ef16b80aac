"""What a command needs of this machine and installation, checked before it starts anything."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterable
from typing import Final

from inferbus.workers.cli.running import CommandFailed
from inferbus.workers.engine import SGLANG_PYTHONS

_EVERY_WORKER: Final = ("prometheus_client", "uvloop")


def check_worker(*, scripted: bool, tracing: bool = False) -> None:
    """Checks that workers can run here.

    Args:
        scripted: Whether they replay a script instead of running SGLang.
        tracing: Whether they export traces.

    Raises:
        CommandFailed: They cannot; says what to do.
    """
    if sys.platform != "linux":
        raise CommandFailed("workers run on Linux only; the client and the other commands run here too")
    if tracing:
        require("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http", extra="tracing")
    if scripted:
        require(*_EVERY_WORKER, extra="worker")
        return
    if sys.version_info[:2] not in SGLANG_PYTHONS:
        versions = " or ".join(f"{major}.{minor}" for major, minor in SGLANG_PYTHONS)
        raise CommandFailed(
            f"SGLang needs Python {versions} and this is {sys.version_info[0]}.{sys.version_info[1]}; "
            "the client and the other commands run here too"
        )
    # In one line: one installation is enough.
    require(*_EVERY_WORKER, "sglang", "nixl", extra="gpu")


def check_gateway() -> None:
    """Checks that the HTTP gateway can run here.

    Raises:
        CommandFailed: Packages are missing; names the extra that has them.
    """
    require("starlette", "uvicorn", "python_multipart", "prometheus_client", extra="gateway")


def check_demo_model() -> None:
    """Checks that the demo model can be converted.

    Raises:
        CommandFailed: Packages are missing; names the extra that has them.
    """
    require("numpy", "gguf", extra="gpu")


def require(*modules: str, extra: str) -> None:
    """Checks that modules are installed.

    Raises:
        CommandFailed: Some are missing; names the extra that has them.
    """
    missing = [name for name in modules if not _installed(name)]
    if missing:
        raise CommandFailed(missing_message(missing, extra=extra))


def missing_message(modules: Iterable[str], *, extra: str) -> str:
    """The line about modules that are not installed."""
    return f"{', '.join(modules)} not installed: pip install 'inferbus[{extra}]'"


def _installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # The package that it would be in.
        return False
    except ValueError:  # Imported already, without a specification.
        return True
