"""What was sent of live answers, kept for a while so that it can be sent again.

Nothing of a live answer is stored. A caller that was without a connection, or that a message did not reach,
asks for the messages from a number on, and gets them on the reply subject of its request. The newest part of
each answer is kept, since a caller usually has all but the last messages. Only answers whose request has a
token (`Infer-Resume`) are kept, and the question has to repeat it.
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

ANSWER_BYTES: Final = 1024 * 1024
"""Kept of one answer; its newest message is kept whatever its size. A chunk of a chat has about 300 bytes."""

TOTAL_BYTES: Final = 64 * 1024 * 1024
"""Kept of all answers. Beyond it those that ended first are dropped, then what was kept of those that began
first."""

STEP: Final = 16 * 1024
"""Bytes of one answer after which these limits are looked at: doing so for every chunk would cost too much."""

OVERHEAD: Final = 64
"""Bytes that a message takes in memory beside its body, about."""

PAUSE: Final = 1.0
"""Seconds between two times that messages of one answer are sent again: a question costs its asker less than
they cost the worker."""


class RetainedAnswer:
    """The newest messages of one answer, numbered from 0; `RetainedAnswers.open` makes it.

    Attributes:
        reply: Where it was sent, and is sent again.
        key: The request's id and its token.
    """

    def __init__(self, answers: RetainedAnswers, key: tuple[str, str], reply: str) -> None:
        self.reply = reply
        self.key = key
        self._answers = answers
        self._messages: deque[bytes] = deque()
        self._first = 0
        self._size = self._counted = 0
        self._count_at = STEP
        self._end: Mapping[str, str] | None = None
        self._sent_again = float("-inf")

    def append(self, body: bytes) -> None:
        """Keeps the next message, which was sent."""
        self._messages.append(body)
        self._size += len(body) + OVERHEAD
        if self._size > self._count_at:
            self._drop(ANSWER_BYTES, keep=1)
            self._answers.make_room()

    def end(self, fields: Mapping[str, str]) -> None:
        """Keeps the end mark, which was sent: from now on the answer is kept for `AWAY` seconds."""
        self._end = fields
        self._count()
        self._answers.ended(self)

    def close(self) -> None:
        """Drops an answer that was not ended: another worker answers."""
        if self._end is None:
            self._answers.forget(self)

    def clear(self) -> None:
        """Drops the messages that were kept up to now."""
        self._drop(0)

    def send_from(self, number: int) -> int:
        """Sends the messages again, from a number on.

        Nothing is sent if that was done a moment ago, or while more is queued for sending than should be. The
        caller asks again if it still misses messages.

        Returns:
            The number of the first message that can be had: `number`, or a higher one where that is not kept.
        """
        first, now = max(number, self._first), self._answers.clock()
        broker = self._answers.broker
        bodies = list(islice(self._messages, first - self._first, None))
        if not bodies and self._end is None:
            return first
        if broker.congested or now - self._sent_again < PAUSE:
            return first
        self._sent_again = now
        sent = first
        try:
            for body in bodies:
                broker.send(self.reply, body)
                sent += 1
        except PayloadTooLarge:
            # The worker is connected to another server than before, which takes less.
            return sent + 1
        if self._end is not None:
            broker.send(self.reply, b"", self._end)
        log.info("answer.sent_again", job=self.key[0], messages=len(bodies))
        return first

    def _drop(self, limit: int, *, keep: int = 0) -> None:
        while self._size > limit and len(self._messages) > keep:
            self._size -= len(self._messages.popleft()) + OVERHEAD
            self._first += 1
        self._count()

    def _count(self) -> None:
        self._answers.size += self._size - self._counted
        self._counted = self._size
        self._count_at = self._size + STEP


class RetainedAnswers:
    """The live answers of one worker that can be sent again.

    Args:
        broker: Where they are sent.
        settled: Whether the connection to NATS is there, and has been for some seconds: time without one does
            not count for `AWAY`.
        clock: Monotonic seconds.

    Attributes:
        size: Bytes kept of all answers.
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
        self._answers: dict[tuple[str, str], RetainedAnswer] = {}
        # In the order in which they began, and ended.
        self._running: OrderedDict[RetainedAnswer, None] = OrderedDict()
        self._ended: OrderedDict[RetainedAnswer, None] = OrderedDict()

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

    def ended(self, answer: RetainedAnswer) -> None:
        """Called by an answer that has ended."""
        if answer in self._running:
            del self._running[answer]
            self._ended[answer] = None
            self._forget_later(answer)

    def forget(self, answer: RetainedAnswer) -> None:
        """Drops an answer; harmless where it was dropped."""
        self._running.pop(answer, None)
        self._ended.pop(answer, None)
        answer.clear()
        if self._answers.get(answer.key) is answer:
            del self._answers[answer.key]

    def make_room(self) -> None:
        """Drops what is beyond `TOTAL_BYTES`."""
        while self.size > TOTAL_BYTES:
            if self._ended:
                self.forget(next(iter(self._ended)))
            else:
                oldest = next(iter(self._running))
                oldest.clear()
                self._running.move_to_end(oldest)

    def _forget_later(self, answer: RetainedAnswer) -> None:
        asyncio.get_running_loop().call_later(AWAY, self._expire, answer)

    def _expire(self, answer: RetainedAnswer) -> None:
        if self._settled() or answer not in self._ended:
            self.forget(answer)
        else:
            self._forget_later(answer)
