"""SGLang's child processes: the functions that run in them, and finding and ending them.

The functions run instead of SGLang's own entry functions, for two reasons.
Ctrl-C and a service manager's SIGTERM reach the whole process group, and an
engine whose children have ended cannot drain. And a child that fails to start
logs its reason and only signals its parent, which cannot report it then.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import multiprocessing
import os
import signal
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

from inferbus.workers.engine.sglang import transfer
from inferbus.workers.engine.sglang.startup import collector_paused
from inferbus.workers.observe import logs

_PR_SET_PDEATHSIG: Final = 1

REPORT: Final = "INFERBUS_ENGINE_REPORT"
"""Environment variable with the file that takes a failed child's last line."""

END_SECONDS: Final = 10.0


def run_scheduler(*arguments: Any, logging_settings: dict[str, Any] | None = None, **named: Any) -> None:
    """SGLang's scheduler process.

    Args:
        arguments: SGLang's.
        logging_settings: `logs.settings` of the parent process.
        named: SGLang's.
    """
    _prepare()
    if logging_settings is not None:
        logs.configure(**logging_settings)
    with collector_paused():
        transfer.register(named.get("server_args", arguments[0] if arguments else None))
        from sglang.srt.managers.scheduler import run_scheduler_process

    run_scheduler_process(*arguments, **named)


def run_detokenizer(*arguments: Any, **named: Any) -> None:
    """SGLang's detokenizer process."""
    _prepare()
    with collector_paused():
        from sglang.srt.managers.detokenizer_manager import run_detokenizer_process

    run_detokenizer_process(*arguments, **named)


def descendants() -> set[int]:
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
    """Whether all of them run; a zombie does not."""
    psutil = _psutil()
    try:
        return all(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE for pid in pids)
    except psutil.NoSuchProcess:
        return False


def _psutil() -> Any:
    """A dependency of SGLang; nothing else here needs it."""
    import psutil

    return psutil


def _prepare() -> None:
    _die_with_parent()
    # SGLang ends its children by SIGKILL, and they end themselves when their parent dies.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if path := os.environ.get(REPORT):
        # SGLang resets the root logger's handlers, so this one sits below it.
        logging.getLogger("sglang.srt.managers").addHandler(_Reporter(Path(path)))


def _die_with_parent() -> None:
    """Also during the import of SGLang; SGLang sets the same later, when the parent may be gone."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    parent = multiprocessing.parent_process()
    if parent is not None and os.getppid() != parent.pid:
        os._exit(1)


class _Reporter(logging.Handler):
    """Keeps the last line of the traceback that SGLang logs when a child of it fails.

    It must not raise: SGLang signals the parent only after it has logged the failure.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(logging.ERROR)
        self._path = path

    def emit(self, record: logging.LogRecord) -> None:
        message = record.getMessage()
        lines = [line.strip() for line in message.splitlines() if line.strip()]
        # The folder is gone once the engine is up.
        if "hit an exception" in message and lines and not self._path.exists():
            with contextlib.suppress(OSError):
                self._path.write_text(lines[-1][:500])
