"""Puts an answer together from messages that may be lost, doubled, late, or of several attempts.

Pure: messages go in, events come out, nothing waits. What the user is given is the final attempt's answer,
once, in order, whatever happened on the way:

* chunks come out in the order of `seq`; one that is not there yet holds back what follows, and `missing`
  tells that it should be fetched from where chunks are stored;
* a newer attempt supersedes an older one, from its first chunk on. Where that goes on after the older
  attempt, nothing is visible. Where it starts anew, what it has in common with what was given already is
  left out; only if it says something else (sampling without a seed) does `Restarted` tell the user to
  forget what came before;
* the final result replaces whatever is still missing, by the same rule.
"""

from __future__ import annotations

import msgspec

from inferbus.schemas.answers import TokenChunk
from inferbus.schemas.errors import InferbusError
from inferbus.schemas.headers import Status
from inferbus.workers.client.deltas import Diverged, Given, Shown, explode
from inferbus.workers.client.messages import Chunk, End, Failure, Message, Piece, Result, Whole, error_of


class Restarted(msgspec.Struct, frozen=True):
    """Forget what came before: a newer attempt says something else, and comes from its beginning."""

    attempt: int


Event = Chunk | Restarted


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """How the answer ended.

    Attributes:
        status: As the end mark or the result says.
        attempt: Which attempt it was.
        error: None for `ok`.
        worker: Who answered, where that is known.
        prefill_worker: The prefill worker that served it, where there was one and it is known.
    """

    status: Status
    attempt: int
    error: InferbusError | None = None
    worker: str | None = None
    prefill_worker: str | None = None


class _Attempt:
    """What is known of one attempt."""

    def __init__(self) -> None:
        self.pieces: dict[int, Piece] = {}
        self.top = -1
        self.whole: Whole | None = None
        self.failure: Failure | None = None
        self.end: End | None = None

    def add(self, message: Message) -> None:
        match message:
            case Piece():
                self.pieces.setdefault(message.seq, message)
                self.top = max(self.top, message.seq)
            case Whole():
                self.whole = self.whole or message
            case Failure():
                self.failure = self.failure or message
            case End():
                self.end = self.end or message


class _Segment(msgspec.Struct):
    """Chunks of one attempt, from its first: that many, or all of them."""

    attempt: int
    chunks: int | None = None


class Assembler:
    """Assembles one answer."""

    def __init__(self) -> None:
        self.given = Given()
        self.outcome: Outcome | None = None
        self._attempts: dict[int, _Attempt] = {}
        self._newest = 0
        # What the newest attempt stands for, once that is known, and the next place in it.
        self._line: list[_Segment] | None = None
        self._at = self._seq = 0
        # What was taken of it; and, while a line repeats what was given, what of that is still to come.
        self._used: list[_Segment] = []
        self._shown: Shown | None = None
        self._count = 0

    @property
    def complete(self) -> bool:
        """Whether there is nothing left to give, and at most the end mark to wait for."""
        newest = self._attempts.get(self._newest)
        return self.outcome is not None or (
            newest is not None and (newest.whole is not None or newest.failure is not None)
        )

    @property
    def missing(self) -> bool:
        """Whether a message that should be there is not: it is late, or lost."""
        newest = self._attempts.get(self._newest)
        if newest is None or self.complete:
            return False
        if self._line is None or self._at + 1 < len(self._line) or newest.top >= self._seq:
            return True
        return newest.end is not None and (newest.end.status != "ok" or newest.end.messages > self._seq)

    @property
    def decided(self) -> bool:
        """Whether an older attempt than the newest has sent its end mark: then its result is the answer."""
        return self.outcome is None and any(
            attempt.end is not None for number, attempt in self._attempts.items() if number < self._newest
        )

    def take(self, message: Message) -> list[Event]:
        """Takes one message, and returns what can be given to the user now."""
        if self.outcome is not None:
            return []
        self._attempts.setdefault(message.attempt, _Attempt()).add(message)
        if message.attempt > self._newest:
            self._newest, self._line = message.attempt, None
        newest = self._attempts[self._newest]
        if newest.whole is not None:
            events = self._replace(explode(newest.whole.answer)) if message is newest.whole else []
        else:
            events = self._emit() if self._aim() else []
        self._conclude(newest, events)
        return events

    def finish(self, result: Result) -> list[Event]:
        """Ends the answer with its stored result, and returns what of that was not given yet."""
        if self.outcome is not None:
            return []
        self._newest = result.attempt
        events = [] if result.answer is None else self._replace(explode(result.answer))
        self.outcome = Outcome(
            status=result.status,
            attempt=result.attempt,
            error=result.error or error_of(result.status),
            worker=result.worker,
            prefill_worker=result.prefill_worker,
        )
        return events

    def close(self) -> None:
        """Ends an answer that is complete, but whose end mark was lost."""
        newest = self._attempts[self._newest]
        error = newest.failure.error if newest.failure else None
        status: Status = "ok" if error is None else "error"
        self.outcome = self.outcome or Outcome(status=status, attempt=self._newest, error=error)

    def _aim(self) -> bool:
        """Points at the next chunk that the newest attempt stands for; False while that is unknown."""
        if self._line is not None:
            return True
        line = self._lineage(self._newest)
        if line is None:
            return False
        if self._used and not _leads(self._used, line):
            self._shown = self.given.shown()
            self._used = []
        self._line = line
        self._at = max(len(self._used) - 1, 0)
        self._seq = (self._used[-1].chunks or 0) if self._used else 0
        return True

    def _lineage(self, number: int) -> list[_Segment] | None:
        """The chunks that make the answer as an attempt tells it; None while its first chunk is not here."""
        attempt = self._attempts.get(number)
        first = attempt and attempt.pieces.get(0)
        if not first:
            return None
        after = first.continues
        if after is None or not 0 < after.attempt < number or after.chunks == 0:
            return [_Segment(number)]
        line = self._lineage(after.attempt)
        if line is not None:
            line[-1].chunks = after.chunks
            line.append(_Segment(number))
        return line

    def _next(self) -> Piece | None:
        line = self._line or []
        if line[self._at].chunks == self._seq:
            self._at, self._seq = self._at + 1, 0
        return self._attempts[line[self._at].attempt].pieces.get(self._seq)

    def _emit(self) -> list[Event]:
        events: list[Event] = []
        while (piece := self._next()) is not None:
            self._step(piece)
            try:
                chunk = self._shown.trim(piece.chunk) if self._shown else piece.chunk
            except Diverged:
                events.append(self._restart())
                self._used, self._at, self._seq = [], 0, 0
                continue
            if self._shown and self._shown.covered:
                self._shown = None
            if chunk is not None:
                events.append(self._give(chunk))
        return events

    def _step(self, piece: Piece) -> None:
        self._seq += 1
        if self._used and self._used[-1].attempt == piece.attempt:
            self._used[-1].chunks = self._seq
        else:
            self._used.append(_Segment(piece.attempt, self._seq))

    def _replace(self, chunks: list[Chunk]) -> list[Event]:
        """Gives what of a whole answer was not given yet."""
        new: list[Chunk | None] = list(chunks)
        events: list[Event] = []
        if self.given:
            shown = self.given.shown()
            try:
                new = [shown.trim(chunk) for chunk in chunks]
                if not shown.covered:
                    raise Diverged
            except Diverged:
                new = list(chunks)
                events.append(self._restart())
        self._used = [_Segment(0, 1)]  # No attempt's chunks lead here.
        return [*events, *(self._give(chunk) for chunk in new if chunk is not None)]

    def _conclude(self, newest: _Attempt, events: list[Event]) -> None:
        """Sets the outcome once nothing can follow."""
        end, failure = newest.end, newest.failure
        if end is None:
            if failure is not None and failure.final:
                self.outcome = Outcome(status="error", attempt=self._newest, error=failure.error)
            return
        error = failure.error if failure is not None else None
        if end.status == "ok":
            if newest.whole is None and not self._at_end(end):
                return
            if self._shown is not None:
                events += self._again()
        elif error is None:
            if end.status == "error":
                return
            error = error_of(end.status)
        self.outcome = Outcome(
            status=end.status,
            attempt=self._newest,
            error=error,
            worker=end.worker,
            prefill_worker=end.prefill_worker,
        )

    def _at_end(self, end: End) -> bool:
        line = self._line
        return line is not None and self._at == len(line) - 1 and self._seq == end.messages

    def _again(self) -> list[Event]:
        """The answer ended before all that was given had come again: so it is another one."""
        self._used, self._at, self._seq = [], 0, 0
        return [self._restart(), *self._emit()]

    def _restart(self) -> Restarted:
        self.given, self._shown, self._count = Given(), None, 0
        return Restarted(self._newest)

    def _give(self, chunk: Chunk) -> Chunk:
        """Numbers a chunk by what the user got, which hides attempts."""
        seq, self._count = self._count, self._count + 1
        if isinstance(chunk, TokenChunk):
            chunk = chunk if chunk.seq == seq else msgspec.structs.replace(chunk, seq=seq)
        elif chunk.get("seq") != seq:
            chunk = {**chunk, "seq": seq}
        self.given.add(chunk)
        return chunk


def _leads(used: list[_Segment], line: list[_Segment]) -> bool:
    """Whether what was taken is how a line begins."""
    if len(used) > len(line):
        return False
    pairs = list(zip(used, line, strict=False))
    if any(mine.attempt != theirs.attempt for mine, theirs in pairs):
        return False
    *whole, (last, there) = pairs
    return all(mine.chunks == theirs.chunks for mine, theirs in whole) and (
        there.chunks is None or (last.chunks or 0) <= there.chunks
    )
