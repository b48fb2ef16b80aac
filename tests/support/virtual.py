"""Processes in virtual time: nothing sleeps, and everything happens in one order.

`Time` holds the only clock. Every process has an event loop of its own (`Loop`), which takes a turn when
`Time` says so: a process that stands still is a loop that is passed over, one that was killed is a loop that
has ended.
"""

from __future__ import annotations

import asyncio
import datetime as dt
import heapq
import itertools
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any, Final

EPOCH: Final = dt.datetime(2026, 1, 1, tzinfo=dt.UTC)
LONGEST: Final = 100_000.0
"""Virtual seconds within which a program must have ended."""

TURNS: Final = 1_000_000
"""Turns of all loops together after which something runs in circles."""


class Time:
    """The clock, and everything that is going to happen."""

    def __init__(self) -> None:
        self.now = 0.0
        self.loops: list[Loop] = []
        self._actions: list[tuple[float, int, Callable[[], None]]] = []
        self._count = itertools.count()
        self._turns = 0

    def wall(self) -> dt.datetime:
        """The time of day, everywhere the same."""
        return EPOCH + dt.timedelta(seconds=self.now)

    def at(self, when: float, action: Callable[[], None]) -> None:
        """Calls `action` at a moment that is not yet over; of one moment, in the order of calls."""
        heapq.heappush(self._actions, (max(when, self.now), next(self._count), action))

    def after(self, seconds: float, action: Callable[[], None]) -> None:
        """Calls `action` later."""
        self.at(self.now + seconds, action)

    def run(self, seconds: float, *, until: Callable[[], bool] = lambda: False) -> None:
        """Lets everything happen for so many seconds, or until something is so."""
        end = self.now + seconds
        while not until():
            loop, due = self._next()
            if due > end:
                self.now = end
                return
            self.now = max(self.now, due)
            if loop is None:
                heapq.heappop(self._actions)[2]()
            else:
                self._turns += 1
                if self._turns > TURNS:
                    raise AssertionError("something runs in circles")
                loop.turn()

    def _next(self) -> tuple[Loop | None, float]:
        """What comes next: an action (None), or a loop's turn."""
        chosen, due = None, self._actions[0][0] if self._actions else float("inf")
        for loop in self.loops:
            wants = loop.due
            if wants is not None and wants < due:
                chosen, due = loop, wants
        return chosen, due


class _NoSelector:
    def select(self, timeout: float | None) -> list[Any]:
        return []

    def close(self) -> None:
        pass


class Loop(asyncio.BaseEventLoop):
    """The event loop of one process; takes a turn when `Time` says so.

    Attributes:
        frozen: The process stands still.
    """

    # Of asyncio's own loop, and not in its stubs.
    _ready: deque[asyncio.Handle]
    _scheduled: list[asyncio.TimerHandle]
    _timer_cancelled_count: int

    def __init__(self, time: Time) -> None:
        super().__init__()
        self._time = time
        self._selector = _NoSelector()
        self._clock_resolution = 1e-9
        self.frozen = False
        time.loops.append(self)

    def time(self) -> float:
        """Virtual seconds."""
        return self._time.now

    @property
    def due(self) -> float | None:
        """When it wants its next turn."""
        if self.frozen:
            return None
        if self._ready:
            return self._time.now
        scheduled = self._scheduled
        while scheduled and scheduled[0].cancelled():
            handle: Any = heapq.heappop(scheduled)
            handle._scheduled = False
            self._timer_cancelled_count -= 1
        return scheduled[0].when() if scheduled else None

    def turn(self) -> None:
        """Runs everything that is ready now."""
        self.call_soon(self.stop)
        self.run_forever()

    def end(self) -> None:
        """Never runs again. Its tasks are cancelled, so that nothing of them is left; nobody hears of it."""
        self.frozen = True
        if self in self._time.loops:
            self._time.loops.remove(self)
        for _ in range(100):
            tasks = asyncio.all_tasks(self)
            if not tasks:
                break
            for task in tasks:
                task.cancel()
            for _ in range(10):
                self.turn()
        for _ in range(3):
            self.turn()
        self.close()

    def _process_events(self, event_list: list[Any]) -> None:
        pass

    def _write_to_self(self) -> None:
        pass


def in_virtual_time(program: Coroutine[None, None, None]) -> float:
    """Runs a program to its end; virtual seconds that it took."""
    time = Time()
    loop = Loop(time)
    task = loop.create_task(program)
    try:
        time.run(LONGEST, until=task.done)
        if not task.done():
            raise AssertionError("something never ends")
        task.result()
        return time.now
    finally:
        loop.end()
