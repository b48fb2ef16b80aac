"""Assembles an answer from messages that may be lost, duplicated, late, or of several attempts.

Pure: messages go in, events come out, nothing waits. The user receives the final attempt's answer, once and
in order:

* chunks come out in the order of `seq`; a missing one holds back what follows, and `missing` says that it
  should be read from where chunks are stored;
* a newer attempt supersedes an older one from its first chunk on. If it continues the older attempt, the user
  notices nothing. If it starts anew, the part that it has in common with what was delivered is left out; only
  if it differs (sampling) does `Restarted` say that everything before is void;
* a server that was killed forgets its newest deliveries, and gives the same attempt to another worker: the
  first chunk names its worker, and one of another worker supersedes the attempt by the same rule;
* the final result replaces whatever is still missing, by the same rule.
"""

from __future__ import annotations

from typing import Final

import msgspec

from inferbus.schemas.answers import ComputedAnswer, TokenChunk
from inferbus.schemas.errors import InferbusError
from inferbus.schemas.headers import Status
from inferbus.workers.client.deltas import AnswerSoFar, DeliveredPrefix, Diverged, to_chunks
from inferbus.workers.client.messages import (
    Answer,
    AnswerMessage,
    Chunk,
    ChunkMessage,
    EndMark,
    ErrorMessage,
    Result,
    WholeMessage,
    of_the_contract,
    parse_message,
    status_error,
)


class Restarted(msgspec.Struct, frozen=True):
    """Everything before is void: a newer attempt differs, and follows from its beginning."""

    attempt: int


Event = Chunk | Restarted


class FinalStatus(msgspec.Struct, frozen=True, kw_only=True):
    """How the answer ended.

    Attributes:
        status: From the end mark or the result.
        attempt: The attempt that ended it.
        error: None for `ok`.
        worker: The worker that answered, if known.
        prefill_worker: The prefill worker that served it, if there was one and it is known.
    """

    status: Status
    attempt: int
    error: InferbusError | None = None
    worker: str | None = None
    prefill_worker: str | None = None


class _Attempt:
    """The messages of one attempt."""

    def __init__(self) -> None:
        # Those that simply followed are kept as the bodies of their messages.
        self.chunks_by_seq: dict[int, ChunkMessage | bytes] = {}
        self.last_seq = -1
        self.whole: WholeMessage | None = None
        self.failure: ErrorMessage | None = None
        self.end: EndMark | None = None

    def superseded_by(self, message: AnswerMessage) -> bool:
        """Whether a message is the first chunk of another worker's attempt of the same number."""
        first = self.chunk(0)
        return (
            isinstance(message, ChunkMessage)
            and message.seq == 0
            and first is not None
            and None not in (first.worker, message.worker)
            and first.worker != message.worker
        )

    def chunk(self, seq: int) -> ChunkMessage | None:
        """A chunk by its number, where it has come."""
        found = self.chunks_by_seq.get(seq)
        if not isinstance(found, bytes):
            return found
        parsed = parse_message(found, None)
        return parsed if isinstance(parsed, ChunkMessage) else None

    def add(self, message: AnswerMessage) -> None:
        match message:
            case ChunkMessage():
                self.chunks_by_seq.setdefault(message.seq, message)
                self.last_seq = max(self.last_seq, message.seq)
            case WholeMessage():
                self.whole = self.whole or message
            case ErrorMessage():
                self.failure = self.failure or message
            case EndMark():
                self.end = self.end or message


class _Segment(msgspec.Struct):
    """The first `chunks` chunks of an attempt; None: all of them."""

    attempt: int
    chunks: int | None = None


_NO_LINEAGE: Final = _Segment(0, 1)
"""No attempt's lineage begins with this."""


class Assembler:
    """Assembles one answer."""

    def __init__(self) -> None:
        self.delivered = AnswerSoFar()
        self.final_status: FinalStatus | None = None
        self._attempts: dict[int, _Attempt] = {}
        self._newest = 0
        # The chunks that make up the newest attempt's answer, once known, and the position in them.
        self._lineage: list[_Segment] | None = None
        self._segment = self._seq = 0
        # What was consumed of it; while it repeats what was delivered, the rest of that.
        self._consumed: list[_Segment] = []
        self._repeated: DeliveredPrefix | None = None
        self._delivered_count = 0
        # The attempt whose next chunk only has to be given out; see `follow`.
        self._flowing: _Attempt | None = None

    @property
    def complete(self) -> bool:
        """Whether nothing but the end mark can follow."""
        newest = self._attempts.get(self._newest)
        return self.final_status is not None or (
            newest is not None and (newest.whole is not None or newest.failure is not None)
        )

    @property
    def whole(self) -> Answer | None:
        """The answer as the worker sent it, where it came in one piece."""
        newest = self._attempts.get(self._newest)
        return None if newest is None or newest.whole is None else newest.whole.answer

    @property
    def missing(self) -> bool:
        """Whether a message is late or lost."""
        newest = self._attempts.get(self._newest)
        if newest is None or self.complete:
            return False
        if self._lineage is None or self._segment + 1 < len(self._lineage) or newest.last_seq >= self._seq:
            return True
        return newest.end is not None and (newest.end.status != "ok" or newest.end.messages > self._seq)

    @property
    def position(self) -> int:
        """Number of the next message of the newest attempt: all before it have come."""
        return self._seq if self._lineage is not None else 0

    @property
    def older_attempt_ended(self) -> bool:
        """Whether an attempt before the newest has sent its end mark: then its result is the answer."""
        return self.final_status is None and any(
            attempt.end is not None for number, attempt in self._attempts.items() if number < self._newest
        )

    @of_the_contract()
    def take(self, message: AnswerMessage) -> list[Event]:
        """Takes one message, and returns the events that the user can receive now.

        Raises:
            InternalError: It does not fit together with what came before it.
        """
        if self.final_status is not None:
            return []
        self._flowing = None
        attempt = self._attempts.setdefault(message.attempt, _Attempt())
        if attempt.superseded_by(message):
            attempt = self._attempts[message.attempt] = _Attempt()
            self._lineage, self._consumed = None, [_NO_LINEAGE]
        attempt.add(message)
        if message.attempt > self._newest:
            self._newest, self._lineage = message.attempt, None
        newest = self._attempts[self._newest]
        if newest.whole is not None:
            events = self._replace(newest.whole) if message is newest.whole else []
        else:
            events = self._deliver_ready() if self._select_lineage() else []
        self._set_final_status(newest, events)
        self._flowing = newest if self._flows(newest) else None
        return events

    @property
    def flows(self) -> bool:
        """Whether the very next chunk can be taken by `follow`."""
        return self._flowing is not None

    def follow(self, attempt: int, seq: int, body: bytes) -> bool:
        """Takes a chunk if it is the very next one and there is nothing to think about; the user then has it.

        Args:
            attempt: As its message says.
            seq: As its message says.
            body: Its message's; it has neither usage nor warnings.

        Returns:
            False: It was not taken, and `take` has to look at it.
        """
        flowing = self._flowing
        if flowing is None or seq != self._seq or attempt != self._newest:
            return False
        flowing.chunks_by_seq[seq] = body
        flowing.last_seq = seq
        self._seq = self._delivered_count = self._consumed[-1].chunks = seq + 1
        self.delivered.follow(body)
        return True

    def _flows(self, newest: _Attempt) -> bool:
        """Whether the newest attempt's next chunk can be given out as it is."""
        return (
            self.final_status is None
            and not (newest.whole or newest.failure or newest.end)
            and self._lineage is not None
            and len(self._lineage) == 1
            and self._repeated is None
            and newest.last_seq + 1 == self._seq == self._delivered_count
            and bool(self._consumed)
            and self._consumed[-1].attempt == self._newest
        )

    @of_the_contract()
    def finish(self, result: Result) -> list[Event]:
        """Ends the answer with its stored result, and returns the part that was not delivered yet.

        Raises:
            InternalError: It is not of the contract.
        """
        if self.final_status is not None:
            return []
        self._flowing = None
        self._newest = result.attempt
        events = [] if result.answer is None else self._replace(result)
        if isinstance(result.answer, ComputedAnswer):
            whole = WholeMessage(attempt=result.attempt, answer=result.answer)
            self._attempts.setdefault(result.attempt, _Attempt()).whole = whole
        self.final_status = FinalStatus(
            status=result.status,
            attempt=result.attempt,
            error=result.error or status_error(result.status),
            worker=result.worker,
            prefill_worker=result.prefill_worker,
        )
        return events

    def close(self) -> None:
        """Ends an answer that is complete but whose end mark was lost."""
        newest = self._attempts[self._newest]
        error = newest.failure.error if newest.failure else None
        status: Status = "ok" if error is None else "error"
        self.final_status = self.final_status or FinalStatus(status=status, attempt=self._newest, error=error)

    def _select_lineage(self) -> bool:
        """Finds the position in the newest attempt's answer; False while its first chunk is missing."""
        if self._lineage is not None:
            return True
        lineage = self._lineage_of(self._newest)
        if lineage is None:
            return False
        if self._consumed and not _is_prefix(self._consumed, lineage):
            self._repeated = self.delivered.prefix()
            self._consumed = []
        self._lineage = lineage
        self._segment = max(len(self._consumed) - 1, 0)
        self._seq = (self._consumed[-1].chunks or 0) if self._consumed else 0
        return True

    def _lineage_of(self, number: int) -> list[_Segment] | None:
        """The chunks that make up an attempt's answer; None while its first chunk is missing."""
        attempt = self._attempts.get(number)
        first = attempt and attempt.chunk(0)
        if not first:
            return None
        after = first.continues
        if after is None or not 0 < after.attempt < number or after.chunks == 0:
            return [_Segment(number)]
        lineage = self._lineage_of(after.attempt)
        if lineage is not None:
            lineage[-1].chunks = after.chunks
            lineage.append(_Segment(number))
        return lineage

    def _next_message(self) -> ChunkMessage | None:
        lineage = self._lineage or []
        if lineage[self._segment].chunks == self._seq:
            self._segment, self._seq = self._segment + 1, 0
        return self._attempts[lineage[self._segment].attempt].chunk(self._seq)

    def _deliver_ready(self) -> list[Event]:
        events: list[Event] = []
        while (message := self._next_message()) is not None:
            self._advance(message)
            try:
                chunk = self._repeated.trim(message.chunk) if self._repeated else message.chunk
            except Diverged:
                events.append(self._restart())
                self._consumed, self._segment, self._seq = [], 0, 0
                continue
            if self._repeated and self._repeated.covered:
                self._repeated = None
            if chunk is not None:
                events.append(self._deliver(chunk))
        return events

    def _advance(self, message: ChunkMessage) -> None:
        self._seq += 1
        if self._consumed and self._consumed[-1].attempt == message.attempt:
            self._consumed[-1].chunks = self._seq
        else:
            self._consumed.append(_Segment(message.attempt, self._seq))

    def _replace(self, message: WholeMessage | Result) -> list[Event]:
        """Delivers the part of a whole answer that was not delivered yet."""
        answer = message.answer
        assert answer is not None  # Both callers have looked.
        chunks = to_chunks(answer, usage=message.usage)
        new: list[Chunk | None] = list(chunks)
        events: list[Event] = []
        if self.delivered:
            prefix = self.delivered.prefix()
            try:
                new = [prefix.trim(chunk) for chunk in chunks]
                if not prefix.covered:
                    raise Diverged
            except Diverged:
                new = list(chunks)
                events.append(self._restart())
        self._consumed = [_NO_LINEAGE]
        events += [self._deliver(chunk) for chunk in new if chunk is not None]
        if self.delivered.usage is None and isinstance(answer, dict):
            # It is known, though no chunk was to say it.
            self.delivered.usage = answer.get("usage")
        return events

    def _set_final_status(self, newest: _Attempt, events: list[Event]) -> None:
        """Sets the final status once nothing can follow."""
        end, failure = newest.end, newest.failure
        if end is None:
            if failure is not None and failure.final:
                self.final_status = FinalStatus(status="error", attempt=self._newest, error=failure.error)
            return
        error = failure.error if failure is not None else None
        if end.status == "ok":
            if newest.whole is None and not self._at_end(end):
                return
            if self._repeated is not None:
                events += self._restart_from_beginning()
        elif error is None:
            if end.status == "error":
                return
            error = status_error(end.status)
        self.final_status = FinalStatus(
            status=end.status,
            attempt=self._newest,
            error=error,
            worker=end.worker,
            prefill_worker=end.prefill_worker,
        )

    def _at_end(self, end: EndMark) -> bool:
        lineage = self._lineage
        return lineage is not None and self._segment == len(lineage) - 1 and self._seq == end.messages

    def _restart_from_beginning(self) -> list[Event]:
        """The answer ended before it had repeated all that was delivered: it differs."""
        self._consumed, self._segment, self._seq = [], 0, 0
        return [self._restart(), *self._deliver_ready()]

    def _restart(self) -> Restarted:
        self.delivered, self._repeated, self._delivered_count = AnswerSoFar(), None, 0
        return Restarted(self._newest)

    def _deliver(self, chunk: Chunk) -> Chunk:
        """Numbers a chunk by its position in what the user received, which hides attempts."""
        seq, self._delivered_count = self._delivered_count, self._delivered_count + 1
        if isinstance(chunk, TokenChunk):
            chunk = chunk if chunk.seq == seq else msgspec.structs.replace(chunk, seq=seq)
        elif chunk.get("seq") != seq:
            chunk = {**chunk, "seq": seq}
        self.delivered.add(chunk)
        return chunk


def _is_prefix(used: list[_Segment], lineage: list[_Segment]) -> bool:
    """Whether what was consumed is the beginning of a lineage."""
    if len(used) > len(lineage):
        return False
    pairs = list(zip(used, lineage, strict=False))
    if any(mine.attempt != theirs.attempt for mine, theirs in pairs):
        return False
    *whole, (last, there) = pairs
    return all(mine.chunks == theirs.chunks for mine, theirs in whole) and (
        there.chunks is None or (last.chunks or 0) <= there.chunks
    )
