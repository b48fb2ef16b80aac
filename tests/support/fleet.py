"""Real worker processes with scripted engines, on the test's own NATS server."""

from __future__ import annotations

import json
import signal
import sys
import tomllib
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from inferbus.schemas.fleet import Role, WorkerInfo
from inferbus.workers.bus.connection.bus import Bus
from inferbus.workers.bus.fleet.registry import Roster
from inferbus.workers.bus.jetstream.provision import provision
from inferbus.workers.config import BusSettings, StreamSettings
from inferbus.workers.stack.processes import Child, Children, spawn
from inferbus.workers.stack.server import NatsServer
from tests.support.eventually import eventually

MODEL = "scripted"

_MAIN = """
import os, sys
from pathlib import Path
from inferbus.workers.config import resolve
from inferbus.workers.roles import run
role, script = sys.argv[1:]
sys.exit(run(role, resolve({}, os.environ), scripted=Path(script)))
"""

DEFAULTS = {"ANNOUNCE_INTERVAL": "0.2", "SLOTS": "8", "ACK_WAIT": "2", "GRACE": "20", "PREFILL_TIMEOUT": "5"}


class Fleet:
    """Starts workers and sees who is here.

    Attributes:
        bus: A connection of the test's own.
        roster: Who is announced.
    """

    def __init__(
        self,
        server: NatsServer,
        bus: Bus,
        roster: Roster,
        directory: Path,
        children: Children,
        *,
        prefix: str = "w",
    ) -> None:
        self.bus = bus
        self.roster = roster
        self._server = server
        self._directory = directory
        self._children = children
        self._prefix = prefix
        self._count = 0

    async def start(
        self, role: Role = "both", script: str = "", *, ready: bool = True, before: str = "", **settings: Any
    ) -> Child:
        """A worker process.

        Args:
            role: Of the worker.
            script: TOML of the scripted engine.
            ready: Wait until it has announced itself.
            before: Python that it runs first.
            settings: Of the worker, by the names of their environment variables.
        """
        tomllib.loads(script)
        self._count += 1
        name = f"{self._prefix}{self._count}"
        path = self._directory / f"{name}.toml"
        path.write_text(script)
        child = await self.spawn(name, [sys.executable, "-c", before + _MAIN, role, str(path)], **settings)
        if ready:
            await self.ready(child, within=30)
        return child

    async def spawn(
        self, name: str, command: Sequence[str], env: Mapping[str, str] | None = None, **settings: Any
    ) -> Child:
        """A process that has a worker's settings, and ends with the fleet."""
        values = DEFAULTS | {"WORKER": name, "NATS_URL": self._server.url}
        values |= {key.upper(): str(value) for key, value in settings.items()}
        env = {f"INFERBUS_{key}": value for key, value in values.items()} | dict(env or {})
        log = self._directory / f"{name}.log"
        return self._children.add(await spawn(name, command, log=log, env=env, cwd=Path.cwd()))

    async def ready(self, child: Child, *, within: float) -> None:
        """Waits until a worker has announced itself."""

        async def announced() -> bool:
            return self.info(child.name) is not None

        await child.until(announced, timeout=within)

    def info(self, name: str) -> WorkerInfo | None:
        """A worker's announcement, once it is ready."""
        found = (each for each in self.roster.workers() if each.worker == name and each.state == "ready")
        return next(found, None)

    async def idle(self, *names: str, within: float = 10.0) -> None:
        """Waits until these workers, or all, have no slot in use and nothing running."""

        def free() -> bool:
            here = [each for each in self.roster.workers() if not names or each.worker in names]
            return bool(here) and all(each.load.busy == each.load.running == 0 for each in here)

        await eventually(free, within=within, what="all workers idle")

    def events(self, child: Child, name: str) -> list[dict[str, Any]]:
        """What a worker logged under one event name."""
        lines = (line for line in child.log.read_text().splitlines() if line.startswith("{"))
        return [event for event in map(json.loads, lines) if event.get("event") == name]


@asynccontextmanager
async def fleet(server: NatsServer, directory: Path, *, model: str = MODEL) -> AsyncIterator[Fleet]:
    """A fleet without workers; those that are started end with the block."""
    bus = await Bus.connect(BusSettings(urls=(server.url,)), name="test fleet")
    try:
        await provision(bus, StreamSettings(), model=model)
        async with Children(grace=5) as children, Roster(bus, model) as roster:
            # Fleets of several models share a server, and no two workers have one id.
            prefix = "w" if model == MODEL else f"{model}-w"
            yield Fleet(server, bus, roster, directory, children, prefix=prefix)
    finally:
        await bus.close()


async def stop(child: Child, *, number: int = signal.SIGTERM) -> int:
    """Signals a worker and waits for its exit code."""
    child.send_signal(number)
    return await child.wait()
