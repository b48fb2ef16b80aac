"""Builds SGLang's engine inside our process, and keeps the process ours.

SGLang's `Engine` replaces signal handlers and logging set-up, ends the process
when a child dies (with status 0 where it is process 1 of a container), and gives
the reason of a failed start in a log only. Here its death ends the process with
`ENGINE_DIED`, and a failed start is a `LaunchFailed` that leaves no process.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import functools
import gc
import logging
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any, Final, NoReturn

import structlog

from inferbus.workers.engine.progress import Progress
from inferbus.workers.engine.sglang import processes
from inferbus.workers.engine.sglang.options import Options, one_line
from inferbus.workers.engine.sglang.redaction import redacted_record, without_secrets
from inferbus.workers.engine.sglang.startup import LaunchFailed
from inferbus.workers.observe import logs

log = structlog.get_logger()

SWITCH_SECONDS: Final = 0.0005
"""How long a thread may hold the interpreter lock while another one waits; 5 ms by default."""

ENGINE_DIED: Final = 70
"""Exit status of a process whose engine died (`EX_SOFTWARE`)."""


def build(options: Options, progress: Progress) -> Any:
    """An `sgl.Engine`, ready, bound to the running event loop. Blocks while the model loads.

    Args:
        options: How to start it.
        progress: Told what is being done.

    Raises:
        LaunchFailed: It did not start.
    """
    if threading.current_thread() is not threading.main_thread():
        raise LaunchFailed("the engine has to be built in the main thread: SGLang needs its signal handlers")
    before = processes.descendants()
    with tempfile.TemporaryDirectory(prefix="inferbus-engine-") as scratch, _own_logging():
        report = Path(scratch, processes.REASON)
        os.environ[processes.REPORT] = scratch
        progress.say("starting the engine's processes")
        progress.follow(Path(scratch, processes.PHASE))
        signals = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGQUIT)}
        # SGLang logs in this process as well.
        logging.setLogRecordFactory(redacted_record)
        try:
            # The loop cannot run while SGLang loads, so SIGTERM has to end the process by itself.
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            engine = _engine_class()(server_args=options.arguments)
            _attach(engine)
        except (Exception, SystemExit) as error:
            processes.end(processes.descendants() - before)
            for number, handler in signals.items():
                signal.signal(number, handler if handler is not None else signal.SIG_DFL)
            reason = without_secrets(report.read_text()) if report.exists() else one_line(error)
            raise LaunchFailed(f"the engine did not start: {reason}") from error
        finally:
            progress.follow(None)
            del os.environ[processes.REPORT]
    return engine


def _engine_class() -> Any:
    """SGLang's `Engine` with our functions in its processes and our handler for their death."""
    from sglang.srt.entrypoints.engine import Engine

    class Embedded(Engine):  # type: ignore[misc]
        run_scheduler_process_func = staticmethod(
            functools.partial(processes.run_scheduler, logging_settings=logs.settings())
        )
        run_detokenizer_process_func = staticmethod(processes.run_detokenizer)

        @classmethod
        def _launch_scheduler_processes(cls, *arguments: Any, **named: Any) -> Any:
            # SGLang has set a handler by now that kills this process without a message.
            signal.signal(signal.SIGQUIT, _fail_start)
            return super()._launch_scheduler_processes(*arguments, **named)

    return Embedded


def _fail_start(_number: int, _frame: FrameType | None) -> NoReturn:
    """Runs when a child fails while the engine starts."""
    raise LaunchFailed("a process of the engine ended while it started")


def _attach(engine: Any) -> None:
    """Starts the tokenizer manager's tasks on the running loop, and takes the signals back.

    SGLang would do this at its first request and take SIGTERM from us then. It happens once per
    manager, so later handlers stay.
    """
    manager = engine.tokenizer_manager
    manager.auto_create_handle_loop()
    loop = asyncio.get_running_loop()
    loop.remove_signal_handler(signal.SIGTERM)
    loop.remove_signal_handler(signal.SIGQUIT)

    def die(_number: int, _frame: FrameType | None) -> NoReturn:
        with contextlib.suppress(RuntimeError):  # The signal may have come in the middle of a write.
            log.critical("engine.died")
        if manager.crash_dump_folder:
            manager.dump_requests_before_crash()
        processes.end(pids & processes.descendants())
        os._exit(ENGINE_DIED)

    pids = set(engine.get_all_child_pids())
    # Not through the loop, which may be busy with the dead engine.
    signal.signal(signal.SIGQUIT, die)


def settle() -> None:
    """Tunes this process for serving, once everything is loaded.

    Loaded objects are taken out of garbage collection, since they live as long as the process. SGLang's
    messages between its processes are thousands of small objects a second, so the collector runs often;
    with a million loaded objects to traverse it took a third of the process's time.

    A thread that converts a prompt gets the interpreter lock sooner than after the default of 5 ms, which
    it would wait several times for each prompt while the event loop is busy with answers.
    """
    sys.setswitchinterval(SWITCH_SECONDS)
    gc.collect()
    gc.freeze()


def stop(engine: Any) -> None:
    """Ends the engine's processes, and what it runs on our event loop.

    Not by `Engine.shutdown`, which kills every child of this process, ours included.
    """
    manager = engine.tokenizer_manager
    if manager._subprocess_watchdog is not None:
        manager._subprocess_watchdog.stop()
    signal.signal(signal.SIGQUIT, signal.SIG_DFL)
    atexit.unregister(engine.shutdown)
    for task in manager.asyncio_tasks:
        task.cancel()
    processes.end(set(engine.get_all_child_pids()) & processes.descendants())


@contextlib.contextmanager
def _own_logging() -> Iterator[None]:
    """Puts the root logger back as it was: SGLang replaces and closes its handlers."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    root.handlers.clear()
    try:
        yield
    finally:
        if handlers:
            root.handlers[:] = handlers
            # The root's level is the program's; SGLang's own, which its flag sets, goes to its loggers.
            logging.getLogger("sglang").setLevel(root.level)
            root.setLevel(level)
