"""What every role's program offers to the worker around it."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any, Protocol

from inferbus.workers.bus.fleet.services import Endpoint


class Program(Protocol):
    """Prefill, decode or both, between start and drain."""

    @property
    def endpoints(self) -> Sequence[Endpoint]:
        """What it serves, for `nats micro`."""
        ...

    async def start(self) -> None:
        """Begins to take work."""
        ...

    async def drain(self, *, grace: float, hurry: asyncio.Event) -> None:
        """Takes nothing more, lets what runs finish within `grace` seconds, hands back the rest.

        Args:
            grace: Seconds.
            hurry: Once set, nothing is waited for any more.
        """
        ...


async def finished_within(work: Coroutine[Any, Any, None], *, grace: float, hurry: asyncio.Event) -> bool:
    """Awaits `work` for `grace` seconds, or until `hurry` is set; whether it finished."""
    task, hurrying = asyncio.create_task(work), asyncio.create_task(hurry.wait())
    try:
        await asyncio.wait((task, hurrying), timeout=grace, return_when=asyncio.FIRST_COMPLETED)
        return task.done()
    finally:
        task.cancel()
        hurrying.cancel()
        await asyncio.gather(task, hurrying, return_exceptions=True)
