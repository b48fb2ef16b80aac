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
import re
import signal
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

from inferbus.workers.engine.sglang import detokenizer, transfer
from inferbus.workers.engine.sglang.redaction import redacted_record, remember_secrets
from inferbus.workers.engine.sglang.startup import collector_paused
from inferbus.workers.observe import logs

_PR_SET_PDEATHSIG: Final = 1

REPORT: Final = "INFERBUS_ENGINE_REPORT"
"""Environment variable with the folder where the children of a starting engine report to their parent."""

REASON: Final = "reason"
"""File in it with a failed child's last line."""

PHASE: Final = "phase"
"""File in it with what the scheduler does."""

_PHASES: Final = (
    ("load weight begin", "loading weights, downloading them first where they are not here"),
    ("load weight end", "allocating the KV cache"),
    ("graph begin", "capturing graphs"),
)
"""What SGLang's messages say while it starts."""

_PHASE_LOGGERS: Final = ("sglang.srt.model_executor", "sglang.srt.speculative")

END_SECONDS: Final = 10.0

STOP_PATTERNS: Final = 8192
"""Compiled stop patterns that a scheduler keeps: of 256 requests with 32 each. Python keeps 512, and would
compile all of them again at every step where there are more."""


def run_scheduler(*arguments: Any, logging_settings: dict[str, Any] | None = None, **named: Any) -> None:
    """SGLang's scheduler process.

    Args:
        arguments: SGLang's.
        logging_settings: `logs.settings` of the parent process.
        named: SGLang's.
    """
    server_args = named.get("server_args", arguments[0] if arguments else None)
    _prepare(server_args)
    # Every step of the scheduler looks up every stop pattern of every request by its text.
    re._MAXCACHE = STOP_PATTERNS  # type: ignore[attr-defined]
    if logging_settings is not None:
        logs.configure(**logging_settings)
    with collector_paused():
        transfer.register(server_args)
        from sglang.srt.managers.scheduler import run_scheduler_process

    run_scheduler_process(*arguments, **named)


def run_detokenizer(*arguments: Any, **named: Any) -> None:
    """SGLang's detokenizer process."""
    _prepare(named.get("server_args", arguments[0] if arguments else None))
    with collector_paused():
        detokenizer.install()
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


def _prepare(server_args: Any) -> None:
    _die_with_parent()
    remember_secrets(server_args)
    logging.setLogRecordFactory(redacted_record)
    # SGLang ends its children by SIGKILL, and they end themselves when their parent dies.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if folder := os.environ.get(REPORT):
        # SGLang resets the root logger's handlers, so these sit below it.
        logging.getLogger("sglang.srt.managers").addHandler(_Reporter(Path(folder, REASON)))
        phases = _Phases(Path(folder, PHASE))
        for name in _PHASE_LOGGERS:
            phases.listen(logging.getLogger(name))


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


class _Phases(logging.Handler):
    """Writes down what a starting engine does, from messages that SGLang does not log at the level it has."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path = path
        self._loggers: list[logging.Logger] = []

    def listen(self, logger: logging.Logger) -> None:
        """Takes the place of the root's handlers, so that those do not show what is below their level."""
        logger.addHandler(self)
        logger.setLevel(logging.INFO)
        logger.propagate = False
        self._loggers.append(logger)

    def emit(self, record: logging.LogRecord) -> None:
        root = logging.getLogger()
        if record.levelno >= root.level:
            root.handle(record)
        message = record.getMessage().lower()
        phase = next((phase for mark, phase in _PHASES if mark in message), None)
        # The folder is gone once the engine is up.
        if not self._path.parent.exists():
            self._end()
        elif phase is not None:
            with contextlib.suppress(OSError):
                self._path.write_text(phase)

    def _end(self) -> None:
        for logger in self._loggers:
            logger.removeHandler(self)
            logger.setLevel(logging.NOTSET)
            logger.propagate = True
