"""What was sent of live answers, kept for a while so that it can be sent again.

Nothing of a live answer is stored. A caller that was without a connection, or that a message did not reach,
asks for the messages from a number on. The newest part of each answer is kept, since a caller usually has all
but the last messages. Only answers whose request has a token (`Infer-Resume`) are kept, and the question has
to repeat it.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping
from itertools import islice
from typing import Final

import structlog

from inferbus.schemas.errors import PayloadTooLarge
from inferbus.workers.bus.interface import Broker

log = structlog.get_logger()

AWAY: Final = 30.0
"""Seconds for which a caller may be without a connection: an answer is kept for so long after its end."""

SWEEP: Final = 3.0
"""Seconds between looks for answers that were kept for so long."""

ANSWER_BYTES: Final = 1024 * 1024
"""Kept of one answer; its newest message is kept whatever its size. A chunk of a chat has about 300 bytes."""

TOTAL_BYTES: Final = 64 * 1024 * 1024
"""Kept of all answers. Beyond it those that ended first are dropped, then what was kept of running ones, in
turns."""

STEP: Final = 16 * 1024
"""Bytes of one answer after which these limits are looked at, since every chunk would be too often."""

OVERHEAD: Final = 64
"""Bytes that a message takes in memory beside its body, about."""

ANSWER_OVERHEAD: Final = 2048
"""Bytes that an answer takes in memory beside its messages, about."""

DROPPED: Final = 10_000
"""Answers that are remembered after they were dropped, so that their callers can be told."""

PAUSE: Final = 1.0
"""Seconds between two times that messages of one answer are sent again: a question costs its asker less than
they cost the worker."""

Key = tuple[str, str]
"""A request's id and its token."""


class RetainedAnswer:
    """The newest messages of one answer, numbered from 0; `RetainedAnswers.open` makes it.

    Attributes:
        reply: Where the answer goes.
        key: Of the request.
        ended: When it ended, monotonic; None before.
        counted: Its bytes, as far as `RetainedAnswers.size` has them.
    """

    def __init__(self, answers: RetainedAnswers, key: Key, reply: str) -> None:
        self.reply = reply
        self.key = key
        self.ended: float | None = None
        self.counted = 0
        self._answers = answers
        self._messages: deque[bytes] = deque()
        self._first = 0
        self._size = self._count_at = ANSWER_OVERHEAD
        self._end: Mapping[str, str] = {}
        self._sent_again = float("-inf")
        self._count()

    @property
    def sent(self) -> int:
        """Messages so far, the end mark counted."""
        return self._first + len(self._messages) + (self.ended is not None)

    def append(self, body: bytes) -> None:
        """Keeps the next message, which was sent."""
        self._messages.append(body)
        self._size += len(body) + OVERHEAD
        if self._size > self._count_at:
            self._drop(ANSWER_BYTES, keep=1)
            self._answers.make_room()

    def end(self, fields: Mapping[str, str]) -> None:
        """Keeps the end mark, which was sent: from now on the answer is kept for `AWAY` seconds."""
        self._end, self.ended = fields, self._answers.clock()
        self._count()
        self._answers.answer_ended(self)

    def close(self) -> None:
        """Drops an answer that was not ended: another worker answers."""
        if self.ended is None:
            self._answers.forget(self)

    def clear(self) -> None:
        """Drops the messages that were kept up to now."""
        self._drop(0)

    def resume(self, reply: str, number: int) -> int:
        """Sends the messages again, from a number on.

        None is sent if that was done a moment ago, or while more is queued for sending than should be. The
        caller asks again if it still misses messages.

        Args:
            reply: Where they go, and all that follow.
            number: Of the first one.

        Returns:
            The number of the first message that can be had: `number`, or a higher one where that is not kept.
        """
        self.reply = reply
        if number < self._first:
            return self._first
        broker, now = self._answers.broker, self._answers.clock()
        if number >= self.sent or broker.congested or now - self._sent_again < PAUSE:
            return number
        self._sent_again = now
        again = list(islice(self._messages, number - self._first, None))
        try:
            for body in again:
                broker.send(reply, body)
        except PayloadTooLarge:
            # The worker is connected to another server than before, which takes less.
            return self.sent
        if self.ended is not None:
            broker.send(reply, b"", self._end)
        log.info("answer.sent_again", job=self.key[0], messages=len(again))
        return number

    def _drop(self, limit: int, *, keep: int = 0) -> None:
        while self._size > limit and len(self._messages) > keep:
            self._size -= len(self._messages.popleft()) + OVERHEAD
            self._first += 1
        self._count()

    def _count(self) -> None:
        self._answers.size += self._size - self.counted
        self.counted = self._size
        self._count_at = self._size + STEP


class RetainedAnswers:
    """The live answers of one worker that can be sent again.

    Args:
        broker: Where they are sent.
        settled: Whether the connection to NATS is there, and has been for some seconds: `AWAY` begins then.
        clock: Monotonic seconds.

    Attributes:
        size: Bytes kept of all answers, about.
    """

    def __init__(
        self,
        broker: Broker,
        *,
        settled: Callable[[], bool] = lambda: True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.broker = broker
        self.clock = clock
        self.size = 0
        self._settled = settled
        self._answers: dict[Key, RetainedAnswer] = {}
        # In the order in which they began or were cleared, ended, and were dropped.
        self._running: OrderedDict[RetainedAnswer, None] = OrderedDict()
        self._ended: OrderedDict[RetainedAnswer, None] = OrderedDict()
        self._dropped: OrderedDict[Key, int] = OrderedDict()
        self._sweep: asyncio.TimerHandle | None = None
        # When it was last seen that the connection was not there for some seconds.
        self._unsettled = float("-inf")

    def __len__(self) -> int:
        return len(self._running) + len(self._ended)

    def open(self, job: str, token: str, reply: str) -> RetainedAnswer:
        """An answer whose messages are kept from now on.

        Args:
            job: The request's id.
            token: Of the request; whoever asks has to know it.
            reply: Where the answer goes.
        """
        answer = RetainedAnswer(self, (job, token), reply)
        self._answers[answer.key] = answer
        self._running[answer] = None
        return answer

    def find(self, job: str, token: str) -> RetainedAnswer | None:
        """The answer to a request, running or ended."""
        return self._answers.get((job, token))

    def dropped(self, job: str, token: str) -> int | None:
        """How many messages, the end mark counted, an answer had that is not kept any more; None: unknown."""
        return self._dropped.get((job, token))

    def answer_ended(self, answer: RetainedAnswer) -> None:
        """Called by an answer that has ended."""
        if answer in self._running:
            del self._running[answer]
            self._ended[answer] = None
            self.make_room()
            self._sweep_later()

    def forget(self, answer: RetainedAnswer) -> None:
        """Drops an answer; harmless where it was dropped."""
        for answers in (self._running, self._ended):
            if answer in answers:
                del answers[answer]
                self.size -= answer.counted
        if self._answers.get(answer.key) is answer:
            del self._answers[answer.key]

    def make_room(self) -> None:
        """Drops what is beyond `TOTAL_BYTES`."""
        while self.size > TOTAL_BYTES and self._ended:
            self._drop_oldest()
        for _ in range(len(self._running) if self.size > TOTAL_BYTES else 0):
            running = next(iter(self._running))
            running.clear()
            self._running.move_to_end(running)
            if self.size <= TOTAL_BYTES:
                break

    def _drop_oldest(self) -> None:
        """Drops the answer that ended first; its caller can still be told."""
        answer = next(iter(self._ended))
        self._dropped[answer.key] = answer.sent
        if len(self._dropped) > DROPPED:
            self._dropped.popitem(last=False)
        self.forget(answer)

    def _sweep_later(self) -> None:
        if self._sweep is None and self._ended:
            self._sweep = asyncio.get_running_loop().call_later(SWEEP, self._drop_old)

    def _drop_old(self) -> None:
        self._sweep, now = None, self.clock()
        if not self._settled():
            self._unsettled = now
        while self._ended and now - max(next(iter(self._ended)).ended or 0.0, self._unsettled) >= AWAY:
            self._drop_oldest()
        self._sweep_later()
