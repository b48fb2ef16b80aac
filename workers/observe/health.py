"""Whether a worker lives, and whether it takes requests: what `/livez` and `/readyz` answer.

startup    the event loop belongs to the engine while it loads      alive, not ready
serving    the loop turns, the engine answers, NATS is connected    alive, ready
draining                                                            alive, not ready
the loop stands still, or the engine is lost                        not alive, not ready
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from typing import Final, Literal

BEAT: Final = 1.0
"""Seconds between two marks that the event loop sets."""

STALLED: Final = 30.0
"""Seconds without a mark after which the event loop stands still."""


class Health:
    """A worker's health; written by its event loop, read by the threads that answer probes.

    Args:
        doing: What the engine does while it loads.
        stalled: Seconds after which an event loop that sets no mark stands still.
    """

    def __init__(self, doing: Callable[[], str], *, stalled: float = STALLED) -> None:
        self._doing = doing
        self._stalled = stalled
        self._marked: float | None = None
        self._connected: Callable[[], bool] = lambda: False
        self._state: Literal["starting", "serving", "draining"] = "starting"
        self._answered = True
        self._lost = False

    @contextlib.asynccontextmanager
    async def watched(self) -> AsyncIterator[None]:
        """Has the event loop set a mark every second while the block runs; the worker ends after it."""
        self._marked = time.monotonic()
        marking = asyncio.create_task(self._mark())
        try:
            yield
        finally:
            marking.cancel()
            self._marked = None
            self._state = "draining"

    def serving(self, connected: Callable[[], bool]) -> None:
        """The worker takes requests from now on.

        Args:
            connected: Whether NATS is connected.
        """
        self._connected = connected
        self._state = "serving"

    def draining(self) -> None:
        """The worker takes nothing more."""
        self._state = "draining"

    def engine_answered(self, answered: bool) -> None:
        """The last look at the engine."""
        self._answered = answered

    def engine_lost(self) -> None:
        """The engine does not come back: the worker ends."""
        self._lost = True

    def dead(self) -> str | None:
        """Why the process should be killed and started again; None while it lives."""
        if self._lost:
            return "the engine is lost"
        marked = self._marked
        if marked is not None and (since := time.monotonic() - marked) > self._stalled:
            return f"the event loop has stood still for {since:.0f} s"
        return None

    def unready(self) -> str | None:
        """Why the worker takes no requests; None while it does."""
        if (reason := self.dead()) is not None:
            return reason
        if self._state == "starting":
            return f"starting: {self._doing()}"
        if self._state == "draining":
            return "draining"
        if not self._connected():
            return "NATS is not connected"
        if not self._answered:
            return "the engine does not answer"
        return None

    async def _mark(self) -> None:
        while True:
            self._marked = time.monotonic()
            await asyncio.sleep(BEAT)
