"""The processes below this one."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import Any, Final

END_SECONDS: Final = 10.0


def below() -> set[int]:
    """The ids of all processes that descend from this one."""
    return {child.pid for child in _psutil().Process().children(recursive=True)}


def end(pids: Iterable[int]) -> None:
    """Kills processes and waits for them, so that their memory and ports are free."""
    psutil, killed = _psutil(), []
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(pid)
            process.kill()
            killed.append(process)
    psutil.wait_procs(killed, timeout=END_SECONDS)


def alive(pids: Iterable[int]) -> bool:
    """Whether all of them run; one that has ended and was not waited for does not."""
    psutil = _psutil()
    try:
        return all(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE for pid in pids)
    except psutil.NoSuchProcess:
        return False


def _psutil() -> Any:
    """SGLang brings it; nothing else here needs it."""
    import psutil

    return psutil
