"""What runs in SGLang's child processes instead of its own entry functions.

Two things go wrong with the plain ones. Ctrl-C and a service manager's SIGTERM
reach the whole process group, and an engine whose children have ended cannot
drain. And a child that fails to start logs its reason and signals its parent,
which then has nothing to tell its user.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import multiprocessing
import os
import signal
from pathlib import Path
from typing import Any, Final

from inferbus.workers.engine.sglang import transfer
from inferbus.workers.engine.sglang.loading import loading

_PR_SET_PDEATHSIG: Final = 1

REPORT: Final = "INFERBUS_ENGINE_REPORT"
"""Environment variable with the file that takes a failed child's last line."""


def run_scheduler(*arguments: Any, **named: Any) -> None:
    """SGLang's scheduler process."""
    _prepare()
    with loading():
        transfer.register(named.get("server_args", arguments[0] if arguments else None))
        from sglang.srt.managers.scheduler import run_scheduler_process

    run_scheduler_process(*arguments, **named)


def run_detokenizer(*arguments: Any, **named: Any) -> None:
    """SGLang's detokenizer process."""
    _prepare()
    with loading():
        from sglang.srt.managers.detokenizer_manager import run_detokenizer_process

    run_detokenizer_process(*arguments, **named)


def _prepare() -> None:
    _die_with_parent()
    # SGLang ends its children by SIGKILL, and they end themselves when their parent dies.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if path := os.environ.get(REPORT):
        # SGLang resets the root logger's handlers, so this one sits below it.
        logging.getLogger("sglang.srt.managers").addHandler(_Reporter(Path(path)))


def _die_with_parent() -> None:
    """Also while SGLang is still being imported; SGLang asks for it later, when the parent may be gone."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    parent = multiprocessing.parent_process()
    if parent is not None and os.getppid() != parent.pid:
        os._exit(1)


class _Reporter(logging.Handler):
    """Keeps the last line of the traceback that SGLang logs when a child of it fails.

    Nothing may come out of here: SGLang tells the parent that a child died after it has logged that.
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
