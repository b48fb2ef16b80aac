"""Ending an attempt from outside, for a reason: cancelled, expired, caller gone, draining."""

from __future__ import annotations

import asyncio
import datetime as dt
import math
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Final, TypeVar

from inferbus.schemas.errors import DeadlineExceeded, InferbusError
from inferbus.schemas.subjects import JobKey

T = TypeVar("T")

TICKS: Final = 0.002
"""Seconds by which uvloop's timers may be early: they count whole milliseconds, as their clock does."""

EARLY_SECONDS: Final = 1.0
"""For which a cancel waits for its live request. It was sent behind it, so both come within moments; a caller
that uses the id again later means another request, which this worker may be the one to get."""

EARLY_MOST: Final = 4096
"""Cancels that wait so; every worker hears of all, and most have no request here."""


class Scope:
    """The part of an attempt that may be ended from outside.

    The first reason counts. Once the scope is left, ending it has no effect: a
    finished answer is stored and acknowledged in any case.

    Args:
        key: The job.
        submission: Which submission of it; None for a live request.
        stored: When the server stored that, or a live request arrived, by the server's clock; None: no stored
            cancel can aim at it.
    """

    def __init__(self, key: JobKey, *, submission: int | None, stored: dt.datetime | None = None) -> None:
        self.key = key
        self.submission = submission
        self.stored = stored
        self._task: asyncio.Task[object] | None = None
        self._reason: InferbusError | None = None
        self._over = False

    def end(self, reason: InferbusError) -> None:
        """Ends the attempt with `reason`; before it began, it will not begin."""
        if self._over or self._reason is not None:
            return
        self._reason = reason
        if self._task is not None:
            self._task.cancel()

    async def run(self, work: Awaitable[T], *, deadline: float | None = None) -> T:
        """Awaits `work` in the current task.

        Args:
            work: What may be ended.
            deadline: Seconds from now after which it ends with `DeadlineExceeded`.

        Raises:
            InferbusError: The reason given to `end`.
        """
        task = asyncio.current_task()
        if task is None:
            raise RuntimeError("a scope runs inside a task")
        timer = None
        try:
            if deadline is not None:
                passed = DeadlineExceeded("the deadline has passed")
                if deadline <= 0:
                    self.end(passed)
                timer = asyncio.get_running_loop().call_later(max(deadline, 0) + TICKS, self.end, passed)
            if self._reason is not None:
                if asyncio.iscoroutine(work):
                    work.close()
                raise self._reason
            self._task = task
            return await work
        except asyncio.CancelledError:
            if self._reason is None:
                raise
            task.uncancel()
            raise self._reason from None
        finally:
            self._over, self._task = True, None
            if timer is not None:
                timer.cancel()


class Scopes:
    """The scopes of this worker's attempts, by job.

    Args:
        clock: Monotonic seconds.
    """

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        # In the order in which they began, and are ended.
        self._open: dict[JobKey, dict[Scope, None]] = {}
        self._early: dict[JobKey, tuple[float, InferbusError]] = {}
        self._over: InferbusError | None = None

    def __len__(self) -> int:
        return sum(len(scopes) for scopes in self._open.values())

    def __iter__(self) -> Iterator[Scope]:
        return iter([scope for scopes in self._open.values() for scope in scopes])

    def add(self, scope: Scope) -> Callable[[], None]:
        """Registers a scope; call what is returned when the attempt is over."""
        self._open.setdefault(scope.key, {})[scope] = None
        if self._over is not None:
            scope.end(self._over)
        elif scope.submission is None:
            when, reason = self._early.pop(scope.key, (-math.inf, None))
            if reason is not None and self._clock() - when <= EARLY_SECONDS:
                scope.end(reason)
        return lambda: self._remove(scope)

    def find(self, key: JobKey) -> list[Scope]:
        """The open attempts at a job."""
        return list(self._open.get(key, ()))

    def end_early(self, key: JobKey, reason: InferbusError) -> None:
        """Ends a live request that has not arrived yet; it is expected within `EARLY_SECONDS`.

        Request and cancel come by two subscriptions, so either may be handled first.
        """
        if len(self._early) >= EARLY_MOST:
            self._early.pop(next(iter(self._early)))
        self._early[key] = (self._clock(), reason)

    def end_all(self, reason: InferbusError) -> int:
        """Ends every attempt, also one that is only about to begin; returns how many there were."""
        self._over = reason
        scopes = list(self)
        for scope in scopes:
            scope.end(reason)
        return len(scopes)

    def _remove(self, scope: Scope) -> None:
        scopes = self._open.get(scope.key, {})
        scopes.pop(scope, None)
        if not scopes:
            self._open.pop(scope.key, None)
