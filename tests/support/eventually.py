"""Waiting for a condition with a deadline, in place of sleeping and hoping."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

INTERVAL = 0.01


async def eventually(
    condition: Callable[[], Any] | Callable[[], Awaitable[Any]], *, within: float = 10.0, what: str = ""
) -> Any:
    """Returns the condition's first true value.

    Args:
        condition: Called again and again; may be a coroutine function.
        within: Seconds.
        what: Named when it never came true.

    Raises:
        AssertionError: It never was.
    """
    deadline = asyncio.get_running_loop().time() + within
    while True:
        value = condition()
        if asyncio.iscoroutine(value):
            value = await value
        if value:
            return value
        if asyncio.get_running_loop().time() > deadline:
            raise AssertionError(f"never came true within {within:g} s: {what or condition}")
        await asyncio.sleep(INTERVAL)
