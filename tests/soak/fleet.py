"""The server and the workers of the soak: real processes, each replaced as soon as it is gone."""

from __future__ import annotations

import asyncio
import datetime as dt
import itertools
import os
import random
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Final

import msgspec

from inferbus.workers.config import ENVIRONMENT
from inferbus.workers.stack.local import PROGRAM
from inferbus.workers.stack.processes import Child, spawn
from inferbus.workers.stack.server import NatsServer
from tests.soak.jobs import ATTEMPTS, MODEL, script

PLACES: Final = 4
ACK_WAIT: Final = 2.0
SETTINGS: Final = {
    "SERVED_MODEL": MODEL,
    "ACK_WAIT": str(ACK_WAIT),
    "ANNOUNCE_INTERVAL": "0.5",
    # Less than the longest jobs take, so that some are handed back.
    "GRACE": "1",
    "MAX_ATTEMPTS": str(ATTEMPTS),
    "SLOTS": "32",
}
PAUSE: Final = (0.1, 1.0)
"""Seconds until a worker that is gone is replaced."""

LONGEST_STOP: Final = 15.0
"""Seconds that a worker may take to end beyond its grace period, on a busy machine."""

HEAD: Final = 4096
"""Bytes of a worker's log in which it says that it is ready, if it ever is."""

NATS_LOST: Final = 3
"""Exit status of a worker that could not reach NATS."""


class Place:
    """Where one worker after the other runs.

    Args:
        number: Of this place.
        start: Starts a worker of that name.
        ended: Told of every worker that ended, and how.
        seed: For how long the place stays empty.
    """

    def __init__(
        self,
        number: int,
        start: Callable[[str], Any],
        ended: Callable[[str, int, set[int]], None],
        *,
        seed: int,
    ) -> None:
        self._number = number
        self._start = start
        self._ended = ended
        self._random = random.Random(f"place {number} {seed}")
        self._child: Child | None = None
        self._sent: set[int] = set()
        self._task: asyncio.Task[None] | None = None

    @property
    def name(self) -> str | None:
        """Of the worker that is here."""
        return self._child.name if self._child is not None and self._child.returncode is None else None

    def send(self, number: signal.Signals) -> None:
        """Signals whoever is here."""
        if self._child is not None:
            self._sent.add(number)
            self._child.send_signal(number)

    def open(self) -> None:
        """From now on somebody is here."""
        self._task = asyncio.create_task(self._run(), name=f"place {self._number}")

    async def close(self) -> None:
        """Ends whoever is here, in good order."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})
        if self._child is not None:
            self._sent.add(signal.SIGTERM)
            code = await self._child.stop(grace=LONGEST_STOP)
            self._ended(self._child.name, code, self._sent)

    async def _run(self) -> None:
        for count in itertools.count(1):
            child: Child = await self._start(f"w{self._number}-{count}")
            self._child, self._sent = child, set()
            try:
                code = await child.wait()
            except asyncio.CancelledError:
                return
            self._child = None
            self._ended(child.name, code, self._sent)
            await asyncio.sleep(self._random.uniform(*PAUSE))


class Fleet:
    """A server and some places.

    Attributes:
        server: Real, and as durable as every one that inferbus ships.
        places: Where workers are.
        ended: How many workers ended, by how.
        misfortunes: When something happened that may have cost jobs an attempt, and how many at most.
        problems: Workers that ended as none should.
    """

    def __init__(self, directory: Path, seed: int) -> None:
        self.server = NatsServer(directory / "nats")
        self.places = [Place(number, self._start, self._ended, seed=seed) for number in range(1, PLACES + 1)]
        self.ended: Counter[str] = Counter()
        self.misfortunes: list[tuple[dt.datetime, int]] = []
        self.problems: list[str] = []
        self._directory = directory
        self._script = directory / "script.json"
        self._server_hit = False

    def hit(self, attempts: int = 1) -> None:
        """Something happens that may cost jobs so many attempts."""
        self.misfortunes.append((dt.datetime.now(dt.UTC), attempts))

    def hits(self, since: dt.datetime, until: dt.datetime) -> int:
        """Attempts that a job can have lost in that time to what happened around it."""
        margin = dt.timedelta(seconds=ACK_WAIT)
        return sum(count for when, count in self.misfortunes if since - margin <= when <= until)

    def hit_server(self) -> None:
        """Something happens to the server: workers that start now may not find it."""
        self._server_hit = True
        self.hit(2)

    @property
    def names(self) -> set[str]:
        """The workers that are here now; fewer than there are places where one is to be replaced."""
        return {name for place in self.places if (name := place.name) is not None}

    @property
    def ready(self) -> int:
        """How many workers are here that have got ready."""
        return sum(map(self._was_ready, self.names))

    def events(self) -> Iterator[dict[str, Any]]:
        """What workers have logged; what is no event comes as one without a name."""
        for path in sorted(self._directory.glob("w*.log")):
            with path.open("rb") as lines:
                for line in lines:
                    yield _event(path.stem, line)

    async def __aenter__(self) -> Fleet:
        self._script.write_bytes(msgspec.json.encode(script()))
        await self.server.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for place in self.places:
            place.send(signal.SIGCONT)
        await asyncio.gather(*(place.close() for place in self.places))
        if self.server.running:
            self.server.child.send_signal(signal.SIGCONT)
        await self.server.stop()

    async def _start(self, name: str) -> Child:
        values = SETTINGS | {"WORKER": name, "NATS_URL": self.server.url}
        inherited: dict[str, str | None] = {each: None for each in os.environ if each.startswith(ENVIRONMENT)}
        env = inherited | {f"{ENVIRONMENT}{key}": value for key, value in values.items()}
        command = [*PROGRAM, "worker", "both", "--scripted", str(self._script)]
        return await spawn(name, command, log=self._directory / f"{name}.log", env=env)

    def _ended(self, name: str, code: int, sent: set[int]) -> None:
        if code == -signal.SIGKILL:
            how = "killed" if signal.SIGKILL in sent else "poisoned"
            if how == "poisoned":
                self.hit()
        elif code == 0 and signal.SIGTERM in sent:
            how = "drained"
        elif code == -signal.SIGTERM and signal.SIGTERM in sent:
            how = "told to stop while starting"
        elif code == NATS_LOST and self._server_hit and not self._was_ready(name):
            how = "without a server"
        else:
            how = f"exit status {code}"
            self.problems.append(f"worker {name} ended with exit status {code}")
        self.ended[how] += 1

    def _was_ready(self, name: str) -> bool:
        with (self._directory / f"{name}.log").open("rb") as log:
            return b'"worker.ready"' in log.read(HEAD)


def _event(worker: str, line: bytes) -> dict[str, Any]:
    try:
        event = msgspec.json.decode(line)
    except msgspec.DecodeError:
        event = None
    if not isinstance(event, dict):
        event = {"text": line.decode(errors="replace").rstrip()}
    return {"worker": worker} | event
