"""Many live requests: bounded concurrency, and retries of what may succeed later."""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable
from typing import Final, TypeVar

from inferbus.schemas.errors import InferbusError
from inferbus.workers.client.messages import Answer
from inferbus.workers.client.stream import AnswerStream

B = TypeVar("B")

FIRST_BACKOFF: Final = 0.1
LAST_BACKOFF: Final = 5.0
"""Seconds before the second attempt, and at most; in between doubled, and always varied at random by half."""


async def answers(
    bodies: Iterable[B], send: Callable[[B], AnswerStream[object]], *, concurrency: int, max_attempts: int
) -> AsyncIterator[Answer | InferbusError]:
    """See `Client.map`.

    Args:
        bodies: Passed to `send` one by one.
        send: Sends one request; may be called several times for a body.
        concurrency: Requests in flight at once.
        max_attempts: For one request.
    """
    if concurrency < 1 or max_attempts < 1:
        raise ValueError("concurrency and max_attempts must be at least 1")
    slots = asyncio.Semaphore(concurrency)
    tasks: deque[asyncio.Task[Answer | InferbusError]] = deque()

    async def answer(body: B) -> Answer | InferbusError:
        async with slots:
            return await _answer(body, send, max_attempts)

    try:
        for body in bodies:
            tasks.append(asyncio.create_task(answer(body)))
            # Answers are yielded in order: while the oldest is slow, as many again may finish behind it.
            if len(tasks) >= 2 * concurrency:
                yield await tasks.popleft()
        while tasks:
            yield await tasks.popleft()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _answer(
    body: B, send: Callable[[B], AnswerStream[object]], max_attempts: int
) -> Answer | InferbusError:
    backoff = FIRST_BACKOFF
    for attempt in range(1, max_attempts + 1):
        try:
            async with send(body) as stream:
                return await stream
        except InferbusError as error:
            if not error.retryable or attempt == max_attempts:
                return error
        await asyncio.sleep(backoff * random.uniform(0.5, 1.5))  # noqa: S311
        backoff = min(2 * backoff, LAST_BACKOFF)
    raise AssertionError("unreachable")
