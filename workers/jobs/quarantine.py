"""Last attempts at jobs whose workers died are made one at a time.

All jobs that a killed worker held come back at the same time, to the same next worker. So a job that kills
its workers costs the jobs beside it as many attempts as itself. An attempt without another such job beside it
shows which one it is.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

LAST_ATTEMPTS: Final = 2
"""For one job: one may be lost because NATS was away, or to another job that kills its worker."""


class Quarantine:
    """Has room for one attempt at a time.

    Attributes:
        occupied: Whether an attempt is under way in it.
    """

    def __init__(self) -> None:
        self.occupied = False

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Occupied while the block runs."""
        self.occupied = True
        try:
            yield
        finally:
            self.occupied = False
