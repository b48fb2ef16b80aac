"""A broker in virtual time: JetStream, as far as the delivery contract can tell.

Messages between a process and the `Server` take time and keep their order, as over one TCP connection.
Either end may go away; what is on its way then is lost. A `Connection` is what the product knows as
`inferbus.workers.bus.interface.Broker`.
"""

from __future__ import annotations

import asyncio
import datetime as dt
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, Final

import msgspec

from inferbus.schemas import headers as names
from inferbus.schemas.errors import BusUnavailable
from inferbus.schemas.subjects import CLASSES, JobClass, Subjects
from inferbus.workers.bus.connection.frames import publish_frame
from inferbus.workers.bus.interface import PubAck, Stored
from inferbus.workers.bus.jetstream.layout import CANCEL, CANCELS_KEPT, DEAD, JOBS, RESULTS, STREAM
from tests.support.virtual import Loop, Time

SUBJECTS: Final = Subjects()
TIMEOUT: Final = 5.0
"""Seconds that the server may take to answer, as `inferbus.workers.bus.connection.bus` has it."""

UNWRITTEN: Final = 0.25
"""Seconds after which a server has written down what it delivered."""

FAMILIES: Final = {
    JOBS: ("jobs",),
    STREAM: ("stream",),
    RESULTS: ("results", "attempts"),
    CANCEL: ("cancel",),
    DEAD: ("dead",),
}
"""Of subjects, in each stream."""


class _Stream:
    """One stream of the server."""

    def __init__(self) -> None:
        self.messages: dict[int, Stored] = {}
        self.subjects: dict[str, list[Stored]] = {}
        self.sequence = 0
        self.ids: dict[str, tuple[float, int]] = {}

    def add(self, subject: str, data: bytes, headers: Mapping[str, str], time: dt.datetime) -> Stored:
        self.sequence += 1
        message = Stored(subject=subject, data=data, headers=dict(headers), sequence=self.sequence, time=time)
        self.messages[self.sequence] = message
        self.subjects.setdefault(subject, []).append(message)
        return message

    def remove(self, message: Stored) -> None:
        del self.messages[message.sequence]
        self.subjects[message.subject].remove(message)


class _Open(msgspec.Struct):
    """A job that was delivered and not acknowledged."""

    delivered: float
    deadline: float = 0.0
    queued: bool = False


class _Pull(msgspec.Struct, frozen=True):
    """A pull request that waits."""

    connection: Connection
    job_class: JobClass


class _Consumer:
    """One class's jobs: those never delivered, those to be delivered again, those that are out."""

    def __init__(self) -> None:
        self.new: deque[int] = deque()
        self.again: deque[int] = deque()
        self.out: dict[int, _Open] = {}
        self.waiting: deque[_Pull] = deque()


class Server:
    """The streams, and the consumers of jobs.

    Args:
        time: Its clock.
        ack_wait: Seconds after the last sign of life after which a job is delivered again.
        window: Seconds within which a second message with one id is dropped.

    Attributes:
        away: Whether it is down.
        deliveries: How often each job was delivered.
        published: Called with every message that was published, stored or not, in the order of the server.
        removed: Called with a job that leaves the queue.
        disturbed: Jobs that were asked back by an owner of the past while they had another one:
            sequence, that attempt, the present attempt.
    """

    def __init__(self, time: Time, *, ack_wait: float, window: float) -> None:
        self.time = time
        self.ack_wait = ack_wait
        self.window = window
        self.away = False
        self.streams = {name: _Stream() for name in FAMILIES}
        self.consumers: dict[JobClass, _Consumer] = {name: _Consumer() for name in CLASSES}
        self.connections: list[Connection] = []
        self.deliveries: dict[int, int] = {}
        self.published: Callable[[Stored], None] = lambda message: None
        self.removed: Callable[[Stored], None] = lambda message: None
        self.disturbed: list[tuple[int, int, int]] = []

    def publish(
        self, subject: str, data: bytes, headers: Mapping[str, str], *, expect: int | None = None
    ) -> PubAck | None:
        """Stores a message where a stream takes its subject, and hands it to subscribers.

        Returns:
            None where another message was expected to be the subject's newest, or no stream takes it, or has
            no room for it.
        """
        family = subject.split(".")[1]
        name = next((name for name, families in FAMILIES.items() if family in families), None)
        if name is None:
            self._tell(Stored(subject=subject, data=data, headers=headers, sequence=0, time=self.time.wall()))
            return None
        stream = self.streams[name]
        named = headers.get(names.MSG_ID)
        if named is not None and (known := stream.ids.get(named)) is not None:
            when, sequence = known
            if self.time.now - when < self.window:
                return PubAck(stream=name, sequence=sequence, duplicate=True)
        newest = stream.subjects.get(subject)
        if expect is not None and (newest[-1].sequence if newest else 0) != expect:
            return None
        if name == CANCEL and newest and len(newest) >= CANCELS_KEPT:
            return None
        message = stream.add(subject, data, headers, self.time.wall())
        if named is not None:
            stream.ids[named] = (self.time.now, message.sequence)
        self._tell(message)
        if name == JOBS:
            consumer = self._consumer(message)
            consumer.new.append(message.sequence)
            self._serve(consumer)
        return PubAck(stream=name, sequence=message.sequence)

    def last(self, stream: str, subject: str) -> Stored | None:
        """The newest message on a subject."""
        found = self.streams[stream].subjects.get(subject)
        return found[-1] if found else None

    def read(self, stream: str, subject: str) -> list[Stored]:
        """All messages on a subject."""
        return list(self.streams[stream].subjects.get(subject, ()))

    def purge(self, stream: str, subject: str) -> None:
        """Removes all messages on a subject."""
        for message in self.read(stream, subject):
            self.streams[stream].remove(message)

    def pull(self, connection: Connection, job_class: JobClass, *, wait: bool) -> bool:
        """Delivers the next job of a class to a connection: now or, where it waits, when there is one."""
        if connection not in self.connections:
            return False
        consumer = self.consumers[job_class]
        if (sequence := self._next(consumer)) is not None:
            self._deliver(consumer, sequence, _Pull(connection, job_class))
            return True
        if wait:
            consumer.waiting.append(_Pull(connection, job_class))
        return False

    def withdraw(self, connection: Connection) -> None:
        """Forgets a connection's waiting pulls."""
        for consumer in self.consumers.values():
            consumer.waiting = deque(pull for pull in consumer.waiting if pull.connection is not connection)

    def ack(self, sequence: int) -> None:
        """Takes a job out of the queue, whoever says so: also an owner of the past, as JetStream does."""
        message = self.streams[JOBS].messages.get(sequence)
        if message is None:
            return
        consumer = self._consumer(message)
        consumer.out.pop(sequence, None)
        if sequence in consumer.again:
            consumer.again.remove(sequence)
        self.streams[JOBS].remove(message)
        self.removed(message)

    def nak(self, sequence: int, attempt: int, delay: float) -> None:
        """Delivers a job again after a delay, whoever says so."""
        message = self.streams[JOBS].messages.get(sequence)
        if message is None:
            return
        consumer = self._consumer(message)
        out = consumer.out.get(sequence)
        if out is None or out.queued:
            return
        if attempt != self.deliveries[sequence]:
            self.disturbed.append((sequence, attempt, self.deliveries[sequence]))
        self._expire_at(consumer, sequence, self.time.now + delay)

    def progress(self, sequence: int) -> None:
        """A sign of life, whoever gives it."""
        message = self.streams[JOBS].messages.get(sequence)
        if message is None:
            return
        consumer = self._consumer(message)
        out = consumer.out.get(sequence)
        if out is not None and not out.queued:
            self._expire_at(consumer, sequence, self.time.now + self.ack_wait)

    def go_away(self, *, forget: int) -> None:
        """Down; the newest `forget` chunks were not yet written, nor then the newest deliveries.

        Where that is so it was killed, and learns message ids anew from the messages that it has.
        """
        self.away = True
        if forget:
            jobs = self.streams[JOBS]
            jobs.ids = {name: known for name, known in jobs.ids.items() if known[1] in jobs.messages}
            for consumer in self.consumers.values():
                self._forget_deliveries(consumer)
        for connection in self.connections:
            connection.lost()
        chunks = self.streams[STREAM]
        for sequence in list(chunks.messages)[-forget:] if forget else ():
            chunks.remove(chunks.messages[sequence])

    def _forget_deliveries(self, consumer: _Consumer) -> None:
        for sequence, out in reversed(list(consumer.out.items())):
            if self.time.now - out.delivered < UNWRITTEN:
                del consumer.out[sequence]
                if sequence in consumer.again:
                    consumer.again.remove(sequence)
                self.deliveries[sequence] -= 1
                waiting = consumer.again if self.deliveries[sequence] else consumer.new
                waiting.appendleft(sequence)

    def come_back(self) -> None:
        """Up again, with everything that was stored."""
        self.away = False
        for consumer in self.consumers.values():
            for sequence in list(consumer.out):
                self._check(consumer, sequence)
        for connection in self.connections:
            connection.found()

    def forget_chunks(self) -> None:
        """Chunks are kept for a while only."""
        self.streams[STREAM].messages.clear()
        self.streams[STREAM].subjects.clear()

    def _tell(self, message: Stored) -> None:
        self.published(message)
        if message.subject.startswith("infer.cancel."):
            for connection in self.connections:
                connection.hear_cancel(message)

    def _consumer(self, message: Stored) -> _Consumer:
        return self.consumers[SUBJECTS.parse_job(message.subject).job_class]

    def _next(self, consumer: _Consumer) -> int | None:
        for waiting in (consumer.again, consumer.new):
            while waiting:
                sequence = waiting.popleft()
                if sequence in self.streams[JOBS].messages:
                    return sequence
        return None

    def _serve(self, consumer: _Consumer) -> None:
        while not self.away and consumer.waiting and (sequence := self._next(consumer)) is not None:
            self._deliver(consumer, sequence, consumer.waiting.popleft())

    def _deliver(self, consumer: _Consumer, sequence: int, pull: _Pull) -> None:
        attempt = self.deliveries[sequence] = self.deliveries.get(sequence, 0) + 1
        consumer.out[sequence] = _Open(self.time.now)
        self._expire_at(consumer, sequence, self.time.now + self.ack_wait)
        pull.connection.deliver(self.streams[JOBS].messages[sequence], attempt, pull.job_class)

    def _expire_at(self, consumer: _Consumer, sequence: int, deadline: float) -> None:
        consumer.out[sequence].deadline = deadline
        self.time.at(deadline, lambda: self._check(consumer, sequence))

    def _check(self, consumer: _Consumer, sequence: int) -> None:
        out = consumer.out.get(sequence)
        if self.away or out is None or out.queued or out.deadline > self.time.now:
            return
        out.queued = True
        consumer.again.append(sequence)
        self._serve(consumer)


class Connection:
    """One process's connection; implements `Broker`.

    Args:
        server: At the other end.
        loop: Of the process.
        latency: Seconds that one message takes.
        buffering: Whether what is sent while the connection is down waits for it to come back.
        max_payload: Largest message.

    Attributes:
        up: Whether there is a connection.
        epoch: How often it was lost.
        sending: Called with subject, body and headers of everything that is sent, as it is sent.
        undisturbed: Since when the connection and the process have been well.
        arrived: Called with a job, its attempt and its class, in the process.
        listeners: Called with whether there is a connection when that changes, in the process.
        on_cancel: Called with subject and headers of every cancel, in the process.
    """

    congested = False

    def __init__(
        self,
        server: Server,
        loop: Loop,
        *,
        latency: Callable[[], float],
        buffering: bool = True,
        max_payload: int = 1024 * 1024,
    ) -> None:
        self.server = server
        self._loop = loop
        self._latency = latency
        self._buffering = buffering
        self.max_payload = max_payload
        self.up = not server.away
        self.undisturbed = server.time.now
        self._cut = self._closed = False
        self.epoch = 0
        self._out_until = self._in_until = 0.0
        self._unsent: list[Callable[[], None]] = []
        self._connected = asyncio.Event()
        if self.up:
            self._connected.set()
        self.sending: Callable[[str, bytes, Mapping[str, str]], None] = lambda subject, data, headers: None
        self.arrived: Callable[[Stored, int, JobClass], None] = lambda message, attempt, job_class: None
        self.listeners: list[Callable[[bool], None]] = []
        self.on_cancel: Callable[[str, Mapping[str, str]], None] = lambda subject, headers: None
        server.connections.append(self)

    def send(
        self, subject: str, data: bytes, headers: Mapping[str, str] | None = None, *, reply: str = ""
    ) -> None:
        """See `Broker`."""
        publish_frame(subject, data, headers, reply, self.max_payload)
        found = dict(headers or {})
        self.sending(subject, data, found)
        self.tell(lambda: self.server.publish(subject, data, found))

    async def ready(self) -> None:
        """See `Broker`."""

    async def flush(self) -> None:
        """See `Broker`."""
        await self.request(lambda: None)

    async def store(
        self,
        subject: str,
        data: bytes,
        headers: Mapping[str, str] | None = None,
        *,
        expect: int | None = None,
    ) -> PubAck | None:
        """See `Broker`."""
        publish_frame(subject, data, headers, "", self.max_payload)
        found = dict(headers or {})
        ack: PubAck | None = await self.request(
            lambda: self.server.publish(subject, data, found, expect=expect)
        )
        return None if ack is not None and ack.duplicate and expect is not None else ack

    async def last(self, stream: str, subject: str) -> Stored | None:
        """See `Broker`."""
        found: Stored | None = await self.request(lambda: self.server.last(stream, subject))
        return found

    async def read(self, stream: str, subject: str) -> list[Stored]:
        """See `Broker`."""
        found: list[Stored] = await self.request(lambda: self.server.read(stream, subject))
        return found

    async def purge(self, stream: str, subject: str) -> None:
        """See `Broker`."""
        await self.request(lambda: self.server.purge(stream, subject))

    async def request(self, action: Callable[[], Any], *, timeout: float = TIMEOUT) -> Any:
        """Has the server do something, and returns what came of it.

        Raises:
            BusUnavailable: No answer in time; it may have been done, or may not.
        """
        answer: asyncio.Future[Any] = self._loop.create_future()

        def answered(result: Any) -> None:
            if not answer.done():
                answer.set_result(result)

        def do() -> None:
            result = action()
            self._back(lambda: answered(result))

        try:
            async with asyncio.timeout(timeout):
                await self._connected.wait()
                self.tell(do)
                return await answer
        except TimeoutError:
            raise BusUnavailable(f"no answer within {timeout:g} s") from None

    async def connected(self) -> None:
        """Returns when there is a connection."""
        await self._connected.wait()

    def tell(self, action: Callable[[], Any]) -> None:
        """Has the server do something, at most once, in the order of calls."""
        if self._closed:
            return
        if not self.up:
            if self._buffering:
                self._unsent.append(lambda: self.tell(action))
            return
        time, epoch = self.server.time, self.epoch
        self._out_until = max(self._out_until, time.now + self._latency())

        def received() -> None:
            if epoch == self.epoch:
                action()

        time.at(self._out_until, received)

    def deliver(self, message: Stored, attempt: int, job_class: JobClass) -> None:
        """The server sends a job. It takes some turns from the socket to who waits, as in nats-py."""

        def read() -> None:
            self._loop.call_soon(self._loop.call_soon, self.arrived, message, attempt, job_class)

        self._back(read)

    def hear_cancel(self, message: Stored) -> None:
        """The server sends a cancel."""
        if self.up:
            self._back(lambda: self.on_cancel(message.subject, message.headers))

    def cut(self) -> None:
        """The network between the two is down."""
        self._cut = True
        self.lost()

    def mend(self) -> None:
        """The network is there again."""
        self._cut = False
        self.found()

    def lost(self) -> None:
        """What is on its way in either direction is lost."""
        if self._closed:
            return
        self.epoch += 1
        self.up = False
        self.server.withdraw(self)
        self._loop.call_soon(self._know, False)

    def found(self) -> None:
        """The connection is made again, if it can be."""
        if self._closed or self._cut or self.server.away or self.up:
            return
        self.up = True
        self.undisturbed = self.server.time.now
        self._out_until = self._in_until = 0.0
        unsent, self._unsent = self._unsent, []
        for action in unsent:
            action()
        self._loop.call_soon(self._know, True)

    def close(self, *, lost: bool = False) -> None:
        """Gone for good, with all that is on its way to it and, if `lost`, all that is on its way from it."""
        self.server.withdraw(self)
        self._closed = True
        self.epoch += lost
        if self in self.server.connections:
            self.server.connections.remove(self)

    def _know(self, up: bool) -> None:
        """A loss is heard of however short it was; a return that was lost again meanwhile is not."""
        if up and not self.up:
            return
        if up:
            self._connected.set()
        else:
            self._connected.clear()
        for listener in self.listeners:
            listener(up)

    def _back(self, action: Callable[[], None]) -> None:
        time, epoch = self.server.time, self.epoch
        self._in_until = max(self._in_until, time.now + self._latency())

        def received() -> None:
            if epoch == self.epoch and not self._closed:
                self._loop.call_soon(action)

        time.at(self._in_until, received)
