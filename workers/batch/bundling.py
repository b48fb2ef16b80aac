"""How lines are put into jobs: bundles sized by what the workers hold, single lines where that is safer."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from typing import Final

import msgspec

from inferbus.schemas.bundles import Bundle, Item
from inferbus.schemas.fleet import WorkerInfo
from inferbus.workers.batch.lines import Line

LINES: Final = 64
"""Most lines of a bundle: beyond, its synced messages cost less than its lines do."""

BYTES: Final = 256 * 1024
"""Bodies of a bundle, as far as one line is not larger."""

SHARE: Final = 4
"""Bundles into which one worker's slots are divided: a worker that takes one must not keep lines from others
that have room."""

WAVES: Final = 2
"""Times what all workers hold that is submitted: as much waits as runs, so that no worker waits for lines."""

NO_WORKER: Final = 64
"""Lines submitted while no worker is announced, so that the first one finds work."""


class Pace(msgspec.Struct, frozen=True, kw_only=True):
    """What is submitted at once.

    Attributes:
        window: Lines submitted and not answered, at most.
        bundle: Lines of one bundle, at most.
        workers: That serve the model.
    """

    window: int = NO_WORKER
    bundle: int = NO_WORKER // SHARE
    workers: int = 0


def pace(workers: Iterable[WorkerInfo], model: str) -> Pace:
    """What the workers of a model admit."""
    slots = [each.load.slots for each in workers if _serves(each, model)]
    if not slots:
        return Pace()
    bundle = max(1, min(LINES, min(slots) // SHARE))
    # At least two bundles a worker: one to run, one to come.
    return Pace(window=max(WAVES * sum(slots), 2 * bundle * len(slots)), bundle=bundle, workers=len(slots))


class Backlog:
    """Lines that are to be submitted: the file's, and those that come back.

    Args:
        lines: Of the file, as far as they are not done.

    Attributes:
        alone: Lines to be sent as jobs of their own.
        again: Lines to be bundled again; they come first.
        suspects: Lines of bundles whose workers died. They are sent one bundle at a time, in halves once that
            has happened again, so that a line that kills its workers is found without costing others more.
    """

    def __init__(self, lines: Iterator[Line]) -> None:
        self.alone: deque[Line] = deque()
        self.again: deque[Line] = deque()
        self.suspects: deque[list[Line]] = deque()
        self._aside: list[Line] = []
        self._lines = lines
        self._held: Line | None = None
        self._over = False

    @property
    def empty(self) -> bool:
        """Whether nothing is left to submit."""
        return not self.alone and not self.again and not self.suspects and self._peek() is None

    def bundle(self, size: int) -> list[Line]:
        """The next lines for one bundle; none where nothing is left."""
        taken: list[Line] = []
        room = BYTES
        while len(taken) < size:
            line = self.again[0] if self.again else self._peek()
            if line is None or (taken and len(bytes(line.body)) > room):
                break
            if self.again:
                self.again.popleft()
            else:
                self._held = None
            room -= len(bytes(line.body))
            taken.append(line)
        return taken

    def died(self, lines: list[Line], *, suspect: bool) -> None:
        """Takes the lines of a bundle whose worker died; `suspect`: that had happened to them before."""
        if not suspect or len(lines) == 1:
            self.suspects.append(lines)
            return
        middle = len(lines) // 2
        self.suspects.extendleft([lines[middle:], lines[:middle]])

    def again_later(self, line: Line) -> None:
        """Puts a line aside until `restore`."""
        self._aside.append(line)

    def restore(self) -> None:
        """The lines that were put aside are the next ones."""
        self.again.extend(self._aside)
        self._aside.clear()

    def rest(self) -> Iterator[Line]:
        """Everything that was not submitted."""
        yield from self.alone
        yield from self.again
        for lines in self.suspects:
            yield from lines
        while (line := self._peek()) is not None:
            self._held = None
            yield line

    def _peek(self) -> Line | None:
        if self._held is None and not self._over:
            self._held = next(self._lines, None)
            self._over = self._held is None
        return self._held


def encode(lines: Iterable[Line]) -> bytes:
    """The body of a bundle."""
    return msgspec.json.encode(Bundle(items=[Item(id=each.number, body=each.body) for each in lines]))


def _serves(worker: WorkerInfo, model: str) -> bool:
    return worker.model == model and worker.role != "prefill" and worker.state == "ready"
