"""The machine that figures were taken on: what it is, how busy it is, and what processes use of it.

Read from Linux's /proc, so that nothing has to be installed and nothing runs beside what is measured.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import subprocess
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Final, NamedTuple, Self

import msgspec

from inferbus.workers.stack.processes import session_members
from inferbus.workers.stack.server import find_binary

TICKS: Final = os.sysconf("SC_CLK_TCK")
KIB: Final = 1024
QUIET: Final = 0.7
"""One-minute load below which a machine counts as idle."""
LOOK_EVERY: Final = 5.0
PROBE_SECONDS: Final = 20.0

_PACKAGES: Final = (
    "inferbus",
    "sglang",
    "torch",
    "nixl",
    "nats-py",
    "msgspec",
    "uvloop",
    "uvicorn",
    "httptools",
)


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """Where the figures come from; no name and no address of it.

    Attributes:
        cpu: Model name.
        cores: That this process may use.
        memory: MiB.
        gpus: As `nvidia-smi -L` names them, without their ids.
        system: Kernel name and architecture.
    """

    cpu: str
    cores: int
    memory: int
    gpus: list[str]
    system: str

    @classmethod
    def here(cls) -> Machine:
        """This machine."""
        return cls(
            cpu=_field(Path("/proc/cpuinfo"), "model name") or platform.machine(),
            cores=len(os.sched_getaffinity(0)),
            memory=int((_field(Path("/proc/meminfo"), "MemTotal") or "0 kB").split()[0]) // KIB,
            gpus=_gpus(),
            system=f"{platform.system()} {platform.machine()}",
        )


class Memory(NamedTuple):
    """Memory of one process, in bytes: all that is resident, and the part that no file stands behind."""

    resident: int
    anonymous: int


def versions() -> dict[str, str]:
    """Versions of everything that has a part in the figures."""
    found = {"python": platform.python_version(), "nats-server": _server_version()}
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "not installed"
    if commit := _said(["git", "-C", str(Path(__file__).parent), "rev-parse", "--short=12", "HEAD"]):
        found["commit"] = commit
    return found


def load() -> list[float]:
    """Processes that wanted to run in the last 1, 5 and 15 minutes."""
    return [round(value, 2) for value in os.getloadavg()]


def wait_until_quiet(limit: float) -> bool:
    """Waits until the one-minute load is low, at most `limit` seconds; whether it came to that."""
    deadline = time.monotonic() + limit
    while os.getloadavg()[0] >= QUIET:
        if time.monotonic() > deadline:
            return False
        time.sleep(LOOK_EVERY)
    return True


def memory(pid: int) -> Memory:
    """Memory of a process."""
    status = Path(f"/proc/{pid}/status")
    resident, anonymous = (int((_field(status, name) or "0").split()[0]) for name in ("VmRSS", "RssAnon"))
    return Memory(resident * KIB, anonymous * KIB)


def cpu_seconds(pid: int) -> float:
    """Processor time of a process so far, threads that have ended included; 0 if it is gone."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return 0.0
    # The command name stands in parentheses and may hold spaces itself.
    fields = stat.rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


class Watch:
    """What a stretch of time took, of the processes of interest and of everybody else on this machine.

        with Watch({"worker": pid}, sessions=[pid, server_pid]) as watch:
            ...
        watch.cpu["worker"]

    Args:
        processes: Whose time is told apart, by a name of one's own.
        sessions: Ids of process sessions that belong to the benchmark, beside this process.

    Attributes:
        seconds: How long it was.
        cpu: Seconds of processor time, by name.
        others: Cores that processes of nobody here used, on average.
        stolen: Cores that the hypervisor kept for other guests, on average.
    """

    def __init__(self, processes: Mapping[str, int], *, sessions: Iterable[int] = ()) -> None:
        self._processes = processes
        self._sessions = list(sessions)
        self.seconds = 0.0
        self.cpu: dict[str, float] = {}
        self.others = 0.0
        self.stolen = 0.0

    def __enter__(self) -> Self:
        self._ours = self._ours_now()
        self._machine = _machine_times()
        self._before = {name: cpu_seconds(pid) for name, pid in self._processes.items()}
        self._started = time.perf_counter()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.seconds = time.perf_counter() - self._started
        self.cpu = {name: cpu_seconds(pid) - self._before[name] for name, pid in self._processes.items()}
        busy, stolen = (now - then for now, then in zip(_machine_times(), self._machine, strict=True))
        ours = sum(seconds - self._ours.get(pid, 0.0) for pid, seconds in self._ours_now().items())
        self.others = max(0.0, round((busy - ours) / self.seconds, 3))
        self.stolen = round(stolen / self.seconds, 3)

    def _ours_now(self) -> dict[int, float]:
        pids = {os.getpid(), *(pid for session in self._sessions for pid in session_members(session))}
        return {pid: cpu_seconds(pid) for pid in pids}


def _machine_times() -> tuple[float, float]:
    """Busy and stolen processor seconds of the whole machine."""
    with Path("/proc/stat").open() as file:
        user, nice, system, _idle, _wait, irq, softirq, stolen = map(int, file.readline().split()[1:9])
    return (user + nice + system + irq + softirq) / TICKS, stolen / TICKS


def _field(file: Path, name: str) -> str | None:
    with file.open() as lines:
        for line in lines:
            key, _, value = line.partition(":")
            if key.strip() == name:
                return value.strip()
    return None


def _gpus() -> list[str]:
    listed = _said(["nvidia-smi", "-L"])
    return [line.partition(" (UUID")[0] for line in listed.splitlines() if line.startswith("GPU ")]


def _server_version() -> str:
    return _said([str(find_binary()), "--version"]).removeprefix("nats-server: v")


def _said(command: list[str]) -> str:
    """What a command prints; nothing where it cannot be run."""
    if shutil.which(command[0]) is None:
        return ""
    try:
        done = subprocess.run(command, capture_output=True, timeout=PROBE_SECONDS, check=True, text=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()
