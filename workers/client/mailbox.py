"""Where an answer's messages wait for its reader, who is woken once for all that come before it runs."""

from __future__ import annotations

import asyncio
from collections import deque

from inferbus.workers.bus.connection.message import Message


class Mailbox:
    """A queue without a limit, for one reader.

    A wait costs no timer of its own: the last one's is left to run out, since mostly something comes before.

    Attributes:
        waiting: The messages, oldest first; None stands where none will come any more.
    """

    def __init__(self) -> None:
        self.waiting: deque[Message | None] = deque()
        self._readers: list[asyncio.Future[None]] = []
        self._timer: asyncio.TimerHandle | None = None
        self._due = 0.0

    def put(self, message: Message | None) -> None:
        """Adds a message."""
        self.waiting.append(message)
        if self._readers:
            self._wake()

    async def news(self, timeout: float | None) -> bool:
        """Waits until something is there; False: nothing came in time.

        Args:
            timeout: Seconds to wait; None: no limit.
        """
        loop = asyncio.get_running_loop()
        due = None if timeout is None else loop.time() + timeout
        while not self.waiting:
            if due is not None:
                self._wake_at(loop, due)
            reader = loop.create_future()
            self._readers.append(reader)
            try:
                await reader
            finally:
                self._readers.remove(reader)
            if due is not None and not self.waiting and loop.time() >= due:
                return False
        return True

    def close(self) -> None:
        """Nobody reads any more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _wake(self) -> None:
        for reader in self._readers:
            if not reader.done():
                reader.set_result(None)

    def _wake_at(self, loop: asyncio.AbstractEventLoop, due: float) -> None:
        if self._timer is not None:
            if self._due <= due:
                return
            self._timer.cancel()
        self._due, self._timer = due, loop.call_at(due, self._timed_out)

    def _timed_out(self) -> None:
        self._timer = None
        self._wake()
