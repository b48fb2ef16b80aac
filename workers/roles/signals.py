"""SIGTERM and SIGINT of a worker: the first one asks it to stop, a second one to hurry."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Iterator
from typing import Final

SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)


class StopSignals:
    """What the signals asked for.

    Attributes:
        stop: Set by the first signal.
        hurry: Set by the second one.
    """

    def __init__(self) -> None:
        self.stop = asyncio.Event()
        self.hurry = asyncio.Event()

    def catch(self) -> None:
        """Handles the signals from now on, until the running event loop is closed."""
        loop = asyncio.get_running_loop()
        for number in SIGNALS:
            loop.add_signal_handler(number, self._received)

    def _received(self) -> None:
        if self.stop.is_set():
            self.hurry.set()
        self.stop.set()


@contextlib.contextmanager
def restored() -> Iterator[None]:
    """Puts back the handlers that were there before: a worker may be one part of a longer program."""
    before = {number: signal.getsignal(number) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            if handler is not None:  # None: installed by code that is not Python's, which cannot be put back.
                signal.signal(number, handler)
