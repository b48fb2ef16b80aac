"""What happens to workers and server meanwhile: made up from a seed, one thing after the other."""

from __future__ import annotations

import asyncio
import random
import signal
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Final

from tests.soak.fleet import ACK_WAIT, Fleet, Place

PAUSES: Final = (0.3, 2.5)
"""Seconds from one deed to the next."""

SHORT: Final = (0.1, ACK_WAIT * 0.8)
LONG: Final = (ACK_WAIT * 1.2, ACK_WAIT * 3)
"""Seconds of standing still: less than a delivery lives without a sign of life, and more."""

AWAY: Final = (0.0, ACK_WAIT * 2)
"""Seconds without a server."""


class Chaos:
    """Does it.

    Attributes:
        done: How often what was done.
    """

    def __init__(self, fleet: Fleet, seed: int) -> None:
        self.done: Counter[str] = Counter()
        self._fleet = fleet
        self._random = random.Random(f"chaos {seed}")
        self._under_way: set[asyncio.Task[None]] = set()
        self._server = asyncio.Lock()
        self._deeds: dict[str, tuple[int, Callable[[Place], Awaitable[None]]]] = {
            "worker killed": (5, self._kill),
            "worker stopped briefly": (2, lambda place: self._stop(place, SHORT)),
            "worker stopped for long": (3, lambda place: self._stop(place, LONG)),
            "worker drained": (3, self._drain),
            "worker hurried": (1, self._hurry),
            "server killed": (1, self._kill_server),
            "server restarted": (1, self._restart_server),
            "server stopped": (1, self._stop_server),
        }

    async def run(self, seconds: float) -> None:
        """Goes on for so long; on return nothing is broken any more but what is being replaced."""
        names = list(self._deeds)
        shares = [share for share, _ in self._deeds.values()]
        try:
            async with asyncio.timeout(seconds):
                while True:
                    await asyncio.sleep(self._random.uniform(*PAUSES))
                    name = self._random.choices(names, shares)[0]
                    place = self._random.choice(self._fleet.places)
                    self._begin(name, place)
        except TimeoutError:
            pass
        while self._under_way:
            await asyncio.gather(*self._under_way)

    def _begin(self, name: str, place: Place) -> None:
        _, deed = self._deeds[name]
        if name.startswith("server"):
            if self._server.locked():
                return
        elif self._fleet.ready < len(self._fleet.places) // 2:
            # On a slow machine nobody would be left who works.
            return
        self.done[name] += 1
        task = asyncio.ensure_future(deed(place))
        self._under_way.add(task)
        task.add_done_callback(self._under_way.discard)

    async def _kill(self, place: Place) -> None:
        self._fleet.hit()
        place.send(signal.SIGKILL)

    async def _stop(self, place: Place, span: tuple[float, float]) -> None:
        # What it has goes to others, and so does what it is given while it stands still.
        self._fleet.hit(2)
        worker = place.name
        place.send(signal.SIGSTOP)
        await asyncio.sleep(self._random.uniform(*span))
        if place.name == worker:
            place.send(signal.SIGCONT)
        self._fleet.hit()

    async def _drain(self, place: Place) -> None:
        self._fleet.hit()
        place.send(signal.SIGTERM)

    async def _hurry(self, place: Place) -> None:
        self._fleet.hit()
        place.send(signal.SIGTERM)
        await asyncio.sleep(self._random.uniform(0.0, 0.5))
        place.send(signal.SIGTERM)

    async def _kill_server(self, _: Place) -> None:
        async with self._server:
            self._fleet.hit_server()
            await self._fleet.server.kill()
            await asyncio.sleep(self._random.uniform(*AWAY))
            await self._fleet.server.restart()
            self._fleet.hit_server()

    async def _restart_server(self, _: Place) -> None:
        async with self._server:
            self._fleet.hit_server()
            await self._fleet.server.restart()
            self._fleet.hit_server()

    async def _stop_server(self, _: Place) -> None:
        async with self._server:
            self._fleet.hit_server()
            child = self._fleet.server.child
            child.send_signal(signal.SIGSTOP)
            await asyncio.sleep(self._random.uniform(*AWAY))
            child.send_signal(signal.SIGCONT)
            self._fleet.hit_server()
