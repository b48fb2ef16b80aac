"""Real worker processes with real engines, of which one may die and another takes its place."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from inferbus.schemas.fleet import Load, Role
from inferbus.workers.stack.processes import Child, session_members
from inferbus.workers.stack.server import NatsServer
from tests.support.eventually import eventually
from tests.support.fleet import Fleet, fleet
from tests.support.forwarder import Forwarder
from tests.support.remote_engine import ENVIRONMENT

MODEL = "tiny"
ADDRESS = "127.0.0.2"
"""Where every prefill worker says that it is; each listens on an address of its own behind it."""

START_SECONDS = 400
FLAGS = ("--max-total-tokens", "8192", "--max-running-requests", "16", "--random-seed", "1")

# Short, so that a test does not take long; the margins that a busy machine needs are in them.
SETTINGS = {"served_model": MODEL, "ack_wait": 6, "prefill_timeout": 10}


class EngineFleet:
    """Starts workers, and knows who is left.

    Attributes:
        url: Of the NATS server.
        fleet: Sees what they announce and log.
        address: What the bootstrap servers of all prefill workers are announced at.
    """

    def __init__(self, server: NatsServer, workers: Fleet, model: str, address: Forwarder) -> None:
        self.url = server.url
        self.fleet = workers
        self.address = address
        self._model = model
        self._workers: dict[Role, list[Child]] = {"prefill": [], "decode": []}
        self._hosts: dict[str, str] = {}

    async def prefill(self) -> Child:
        """The prefill worker, started where the last one was killed."""
        alive = self._alive("prefill")
        if alive:
            return alive[0]
        starting = await self._start("prefill")
        await self.take_over(starting)
        return await self._ready(starting)

    async def another_prefill(self, name: str) -> Child:
        """A second prefill worker at the same address, which still leads to the first."""
        return await self._ready(await self._start("prefill", name))

    async def take_over(self, prefill: Child) -> None:
        """Has the common address lead to this one."""
        await self.address.lead_to(self._hosts[prefill.name])

    async def decodes(self, count: int = 1) -> list[Child]:
        """So many decode workers, started where others were killed."""
        missing = count - len(self._alive("decode"))
        started = [await self._start("decode") for _ in range(missing)]
        await asyncio.gather(*map(self._ready, started))
        return self._alive("decode")[:count]

    def load(self, worker: Child) -> Load:
        """As it announces it."""
        info = self.fleet.info(worker.name)
        assert info is not None, f"{worker.name} is not there"
        return info.load

    async def idle(self, *workers: Child, within: float) -> None:
        """Waits until these hold no slot, no request and no token of KV cache that is in use."""

        def free() -> bool:
            loads = [info.load for worker in workers if (info := self.fleet.info(worker.name)) is not None]
            return len(loads) == len(workers) and not any(
                load.busy or load.running or load.waiting or load.kv_used for load in loads
            )

        await eventually(free, within=within, what="what nobody waits for any more has ended")

    def _alive(self, role: Role) -> list[Child]:
        return [worker for worker in self._workers[role] if worker.returncode is None]

    async def _start(self, role: Role, name: str = "") -> Child:
        name = name or f"{role}-{len(self._workers[role]) + 1}"
        command = [
            sys.executable,
            "-m",
            "inferbus.workers.cli",
            "worker",
            role,
            "--model-path",
            self._model,
            *FLAGS,
        ]
        settings = dict(SETTINGS)
        if role == "prefill":
            self._hosts[name] = f"127.0.0.{10 + len(self._workers[role])}"
            command += ["--host", self._hosts[name]]
            settings |= {"bootstrap_host": ADDRESS, "bootstrap_port": self.address.port}
        # Without a network SGLang could not find out its own address.
        env = ENVIRONMENT | {"SGLANG_HOST_IP": "127.0.0.1"}
        child = await self.fleet.spawn(name, command, env, **settings)
        self._workers[role].append(child)
        return child

    async def _ready(self, worker: Child) -> Child:
        await self.fleet.ready(worker, within=START_SECONDS)
        return worker


@asynccontextmanager
async def engine_fleet(server: NatsServer, directory: Path, model: str) -> AsyncIterator[EngineFleet]:
    """A fleet without workers; those that are started end with the block."""
    with socket.socket() as probe:
        probe.bind((ADDRESS, 0))
        port = probe.getsockname()[1]
    address = Forwarder(ADDRESS, port)
    try:
        async with fleet(server, directory, model=MODEL) as workers:
            yield EngineFleet(server, workers, model, address)
    finally:
        await address.close()


def scheduler(worker: Child) -> int:
    """The process of a worker that computes."""
    pids = [pid for pid in session_members(worker.pid) if "scheduler" in _title(pid)]
    assert len(pids) == 1, f"{len(pids)} schedulers"
    return pids[0]


def freeze(*pids: int) -> None:
    """Stops processes as a hung machine does: nothing ends, nothing answers."""
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)


def thaw(*pids: int) -> None:
    """Lets them go on."""
    for pid in pids:
        os.kill(pid, signal.SIGCONT)


async def kill(worker: Child) -> None:
    """Ends a worker without a word; its engine's processes go with it, which is waited for."""
    worker.send_signal(signal.SIGKILL)
    await worker.wait()
    await eventually(lambda: not session_members(worker.pid), what=f"nothing is left of {worker.name}")


def _title(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
