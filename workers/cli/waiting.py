"""Says on standard error whether a worker serves the model that a command waits for."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Final

from inferbus.schemas.errors import BusUnavailable
from inferbus.workers.cli.running import note, warn
from inferbus.workers.client import Client
from inferbus.workers.client.models import unserved

LOOK_EVERY: Final = 3.0
"""Seconds between two looks at the registry; no line comes more often."""


@contextlib.asynccontextmanager
async def telling_of_workers(
    client: Client, model: str | None, *, waiting: str = "the job"
) -> AsyncIterator[None]:
    """While the block runs, says when no worker serves a model, and when one does again.

    Args:
        client: Connected.
        model: Its name; None where there is nothing to wait for.
        waiting: What waits for a worker.
    """
    if model is None:
        yield
        return
    served = await _look(client, model, waiting, served=True)
    following = asyncio.create_task(_follow(client, model, waiting, served))
    try:
        yield
    finally:
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)


async def _follow(client: Client, model: str, waiting: str, served: bool) -> None:
    while True:
        await asyncio.sleep(LOOK_EVERY)
        served = await _look(client, model, waiting, served=served)


async def _look(client: Client, model: str, waiting: str, *, served: bool) -> bool:
    """Whether the model is served; says so if it was otherwise before."""
    try:
        models = await client.models()
    except BusUnavailable:
        return served  # Whoever waits hears of it, if that lasts.
    if model in models and not served:
        note(f"a worker serves the model {model!r} now")
    elif model not in models and served:
        warn(f"{waiting} waits: {unserved(model, models)}")
    return model in models
