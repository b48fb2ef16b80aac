"""Child processes that never outlive their parent.

Each child leads a session of its own, writes to a log file, and is killed by the kernel when the process
that started it dies, however it dies. Stopping a child ends the whole session and checks that nothing is left
of it: an engine has children of its own, and a SIGKILL to the worker alone could leave them holding memory
and ports.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType

from inferbus.workers.stack.errors import ProcessExited, ProcessNotReady

TAIL_LINES = 25
POLL_SECONDS = 0.05
REAP_SECONDS = 5.0

# Runs in the new process and replaces itself by the command. A `preexec_fn` would do the same between fork
# and exec, where a multi-threaded parent can deadlock the child. The parent may die before prctl is called;
# then the signal would never come, hence the second look at the parent's id.
_GUARD = """
import ctypes, os, signal, sys
parent = int(sys.argv[1])
if sys.platform == "linux":
    PR_SET_PDEATHSIG = 1
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
try:
    os.execvp(sys.argv[2], sys.argv[2:])
except OSError as error:
    sys.exit(f"cannot run {sys.argv[2]}: {error.strerror}")
"""


class Child:
    """One supervised process. Made by `spawn`."""

    def __init__(self, name: str, process: asyncio.subprocess.Process, log: Path) -> None:
        self.name = name
        self.log = log
        self._process = process

    @property
    def pid(self) -> int:
        """Process id, which is also the id of the child's session and process group."""
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        """Exit status, negative for a signal; None while the process runs."""
        return self._process.returncode

    def tail(self, lines: int = TAIL_LINES) -> list[str]:
        """The last lines that the child wrote."""
        try:
            with self.log.open(encoding="utf-8", errors="replace") as file:
                return [line.rstrip("\n") for line in deque(file, maxlen=lines)]
        except FileNotFoundError:
            return []

    async def wait(self) -> int:
        """Waits until the process ends by itself."""
        return await self._process.wait()

    async def until(
        self, probe: Callable[[], Awaitable[bool]], *, timeout: float, poll: float = POLL_SECONDS
    ) -> None:
        """Waits until `probe` is true.

        Raises:
            ProcessExited: The process ended first; the message carries the end of its log.
            ProcessNotReady: `timeout` seconds passed; the process is left running.
        """
        exited = asyncio.ensure_future(self._process.wait())
        try:
            async with asyncio.timeout(timeout):
                while not await probe():
                    await asyncio.wait([exited], timeout=poll)
                    if exited.done():
                        raise self.exited()
        except TimeoutError:
            raise ProcessNotReady(self.name, timeout, self.log, self.tail()) from None
        finally:
            exited.cancel()

    def exited(self) -> ProcessExited:
        """The error for this process, which has ended: its exit status and last output."""
        assert self.returncode is not None
        return ProcessExited(self.name, self.returncode, self.log, self.tail())

    def send_signal(self, number: int) -> None:
        """Signals the process alone, not its children; nothing happens once it has ended."""
        if self.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(number)

    def kill(self) -> None:
        """SIGKILL the process and everything it started, without waiting."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        for pid in session_members(self.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    async def stop(self, *, grace: float = 10.0) -> int:
        """Sends SIGTERM, after `grace` seconds SIGKILL, and waits until the whole session has ended."""
        if self.returncode is None:
            self.send_signal(signal.SIGTERM)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._process.wait(), grace)
        self.kill()
        code = await self._process.wait()
        async with asyncio.timeout(REAP_SECONDS):
            while any(session_members(self.pid)):
                self.kill()
                await asyncio.sleep(POLL_SECONDS)
        return code


async def spawn(
    name: str,
    command: Sequence[str | Path],
    *,
    log: Path,
    env: Mapping[str, str | None] | None = None,
    cwd: Path | None = None,
) -> Child:
    """Starts a command that ends with this process; its output goes to the file `log`.

    Args:
        name: For messages.
        command: Program and arguments.
        log: File for its output, appended to.
        env: Variables to set in addition to the parent's; None removes one.
        cwd: Where it runs; here by default.
    """
    guard = [sys.executable, "-I", "-S", "-c", _GUARD, str(os.getpid())]
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as output:
        process = await asyncio.create_subprocess_exec(
            *guard,
            *map(str, command),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env={name: value for name, value in {**os.environ, **(env or {})}.items() if value is not None},
            cwd=cwd,
            start_new_session=True,
        )
    return Child(name, process, log)


class Children:
    """Several children that are stopped together, the last started first.

    Use as an asynchronous context manager: leaving it, by an error or not, leaves no process behind.
    """

    def __init__(self, *, grace: float = 10.0) -> None:
        self.grace = grace
        self._children: list[Child] = []

    def __iter__(self) -> Iterator[Child]:
        return iter(self._children)

    def add(self, child: Child) -> Child:
        """Adds a child to be stopped with the others."""
        self._children.append(child)
        return child

    async def first_exit(self) -> Child:
        """Waits until any of the children ends, and returns it."""
        waits = {asyncio.ensure_future(child.wait()): child for child in self._children}
        try:
            done, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
        return waits[done.pop()]

    async def stop(self) -> None:
        """Stops all children; those started last stop first, and each has its own grace period."""
        while self._children:
            try:
                await self._children[-1].stop(grace=self.grace)
            finally:
                self._children.pop().kill()

    async def __aenter__(self) -> Children:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await asyncio.shield(self.stop())


def session_members(session: int) -> list[int]:
    """Ids of the living processes of a session; zombies do not count. Empty where there is no /proc."""
    members = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            stat = (entry / "stat").read_text()
        except (FileNotFoundError, ProcessLookupError):
            continue
        # The command name stands in parentheses and may itself contain spaces and parentheses.
        state, _ppid, _pgrp, sid = stat.rpartition(")")[2].split()[:4]
        if int(sid) == session and state not in "ZX":
            members.append(int(entry.name))
    return members
