"""One delivery of one job over JetStream, and the heartbeats that keep it this worker's."""

from __future__ import annotations

import asyncio
import contextlib
import datetime as dt
import time
import weakref
from collections.abc import Callable
from typing import Final

import msgspec
import structlog

from inferbus.schemas.errors import BusUnavailable
from inferbus.workers.bus.connection.bus import Bus
from inferbus.workers.bus.connection.message import Message
from inferbus.workers.bus.durations import nanoseconds, seconds
from inferbus.workers.bus.errors import NoResponders
from inferbus.workers.bus.interface import Stored

log = structlog.get_logger()

NAK: Final = b"-NAK"
"""Gives a job back: it is delivered again before new ones, after those that were given back before."""
ACK_TIMEOUT: Final = 2.0
ACK_TRIES: Final = 3
FORGOTTEN: Final = 1.0
"""Seconds after which a delivery survives a kill of the server, which writes it to disk a moment later
(nats-server, consumerFileStore.flushLoop) and delivers a job again whose delivery it has not written."""
SUSPECT: Final = 1.0
"""Seconds after a stall for which arriving messages may have been sent before it."""
_ACK_PREFIX: Final = ("$JS", "ACK")


class AckSubject(msgspec.Struct, frozen=True):
    """The fields of a delivery's reply subject."""

    stream: str
    consumer: str
    attempt: int
    sequence: int
    time: dt.datetime

    @classmethod
    def parse(cls, subject: str) -> AckSubject | None:
        """None for any other subject.

        `$JS.ACK.<stream>.<consumer>.<delivered>.<sseq>.<cseq>.<time>.<pending>`; domain and account come
        before the stream, and a random token last, where the server is new enough or has a domain (ADR-15).
        """
        tokens = subject.split(".")
        if tuple(tokens[:2]) != _ACK_PREFIX or len(tokens) < 9:
            return None
        start = 2 if len(tokens) == 9 else 4
        stream, consumer, delivered, sequence, _, stamp = tokens[start : start + 6]
        time = dt.datetime.fromtimestamp(seconds(int(stamp)), dt.UTC)
        return cls(stream, consumer, int(delivered), int(sequence), time)


class NatsDelivery:
    """Implements `Delivery`.

    `ack`, `nak` and `term` are requests, which the server confirms: a job whose acknowledgement is lost runs
    again. `ack` and `term` are tried more than once, which the server takes as one.
    """

    def __init__(self, bus: Bus, message: Message, ack: AckSubject, heartbeats: Heartbeats) -> None:
        self._bus = bus
        self._reply = message.reply
        self._stream = ack.stream
        self._heartbeats = heartbeats
        self._ending = False
        self._message = Stored(
            subject=message.subject,
            data=message.data,
            headers=message.headers,
            sequence=ack.sequence,
            time=ack.time,
            forwarded=message.forwarded,
            undecodable=message.undecodable,
        )
        self._attempt = ack.attempt
        self._taken = self._seen = time.monotonic()
        self._stale = self._forgotten = False
        heartbeats.add(self)

    @property
    def message(self) -> Stored:
        """See `Delivery`."""
        return self._message

    @property
    def attempt(self) -> int:
        """See `Delivery`."""
        return self._attempt

    @property
    def stale(self) -> bool:
        """See `Delivery`. Once stale, always stale: attempts that saw it have ended."""
        self._stale = self._stale or time.monotonic() - self._seen > self._heartbeats.ack_wait
        return self._stale

    @property
    def forgotten(self) -> bool:
        """See `Delivery`."""
        return self._forgotten

    @property
    def job(self) -> tuple[str, int]:
        """The job, by its stream and sequence."""
        return self._stream, self._message.sequence

    @property
    def running(self) -> bool:
        """Whether this delivery's end was not begun, and it is not stale."""
        return not (self._ending or self.stale)

    def renew(self, reply: str) -> None:
        """The job was delivered here once more, by this reply subject: goes on, and tells the server."""
        self._reply = reply
        self.beat()

    def cut_off(self) -> None:
        """The connection is lost: stale, if so recent that a server that was killed may have forgotten it."""
        self._forgotten = self._forgotten or time.monotonic() - self._taken < FORGOTTEN
        self._stale = self._stale or self._forgotten

    async def ack(self) -> None:
        """See `Delivery`."""
        await self._end(b"+ACK")

    async def nak(self, delay: float) -> None:
        """See `Delivery`. Without a delay it comes back at once."""
        if self.stale:
            # Another worker may own the job by now, and this would take it away.
            self._heartbeats.discard(self)
            return
        body = {"delay": nanoseconds(delay)}
        # Once: the server looks at the job and not at the delivery (nats-server, processNak). A second one,
        # sent because the first was slow, would take the job from its next owner. A lost one costs the ack
        # wait.
        await self._end(NAK + b" " + msgspec.json.encode(body) if delay > 0 else NAK, tries=1)

    async def term(self, reason: str) -> None:
        """See `Delivery`. nats-py's `term` takes no reason."""
        await self._end(b"+TERM " + " ".join(reason.split()).encode(errors="replace")[:1024])

    def beat(self) -> None:
        """Sends one heartbeat, at most once: the next one comes before the ack wait is over."""
        if self.stale:
            self._heartbeats.discard(self)
            return
        self._seen = time.monotonic()
        self._bus.send(self._reply, b"+WPI")

    async def _end(self, body: bytes, *, tries: int = ACK_TRIES) -> None:
        problem: BusUnavailable | None = None
        # From here on the server may deliver it again: it was given back.
        self._ending = True
        try:
            for _ in range(tries):
                try:
                    await self._bus.request(self._reply, body, timeout=ACK_TIMEOUT)
                except NoResponders as error:
                    # The consumer is gone, or JetStream is: nothing that another try would change soon.
                    problem = error
                    break
                except BusUnavailable as error:
                    problem = error
                else:
                    return
        finally:
            # Also after a failure: a job that was not acknowledged is to be delivered again.
            self._heartbeats.discard(self)
        raise BusUnavailable(f"the server did not confirm the end of a delivery: {problem}") from problem


class Heartbeats:
    """Sends heartbeats (`+WPI`) for every open delivery, less than a third of the ack wait apart.

    A third, so that one lost or late heartbeat does not have the job delivered again. Deliveries are held
    weakly: one whose owner dropped it without ending it, by a defect or because NATS was away, gets no more
    heartbeats, and so is delivered again.

    Args:
        ack_wait: Of the consumers, in seconds; the shortest where they differ. See `follow`.
        stalled: Called after this process was stopped for a while.

    Attributes:
        sent: Heartbeats so far.
        suspect_until: Monotonic seconds until which arriving jobs are too old to be begun.
    """

    def __init__(self, bus: Bus, ack_wait: float, *, stalled: Callable[[], None] = lambda: None) -> None:
        self._bus = bus
        self.ack_wait = ack_wait
        self._changed_wait = asyncio.Event()
        self._stalled = stalled
        self._open: weakref.WeakSet[NatsDelivery] = weakref.WeakSet()
        self._by_job: weakref.WeakValueDictionary[tuple[str, int], NatsDelivery] = (
            weakref.WeakValueDictionary()
        )
        self._task: asyncio.Task[None] | None = None
        self._forget: Callable[[], None] = lambda: None
        self._stopping = False
        self.sent = 0
        self.suspect_until = 0.0

    def __len__(self) -> int:
        return len(self._open)

    def start(self) -> None:
        """Begins to send."""
        self._forget = self._bus.on_change(self._changed)
        self._task = asyncio.create_task(self._run(), name="bus-heartbeats")

    def stop(self) -> None:
        """Ends once nothing is open any more."""
        self._stopping = True
        if self._task is not None and not self._open:
            self._task.cancel()

    def follow(self, ack_wait: float) -> None:
        """The consumers have another ack wait.

        Heartbeats go out before it applies, so that no job is stale whose last one was in time.
        """
        if ack_wait == self.ack_wait:
            return
        log.info("jobs.ack_wait_changed", seconds=ack_wait, before=self.ack_wait)
        if self._bus.connected:
            self._beat()
        self.ack_wait = ack_wait
        self._changed_wait.set()

    def again(self, ack: AckSubject, reply: str) -> bool:
        """Whether a delivery is one more of a job that is open here; the open one goes on with it."""
        delivery = self._by_job.get((ack.stream, ack.sequence))
        if delivery is None or not delivery.running:
            return False
        delivery.renew(reply)
        return True

    def add(self, delivery: NatsDelivery) -> None:
        """From now on."""
        self._open.add(delivery)
        self._by_job[delivery.job] = delivery

    def discard(self, delivery: NatsDelivery) -> None:
        """No more; harmless when it is not there."""
        self._open.discard(delivery)
        if self._stopping:
            self.stop()

    def _changed(self, connected: bool) -> None:
        if not connected:
            for delivery in list(self._open):
                delivery.cut_off()

    async def _run(self) -> None:
        try:
            await self._go_on()
        finally:
            self._forget()

    async def _go_on(self) -> None:
        while not self._bus.closed.is_set():
            interval = self.ack_wait / 3 * 0.9
            due = time.monotonic() + interval
            self._changed_wait.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(interval):
                    await self._changed_wait.wait()
            now = time.monotonic()
            if now - due > self.ack_wait / 2:
                # This process was stopped: the ack wait of a job sent meanwhile is over, or will be soon.
                self.suspect_until = now + SUSPECT
                self._stalled()
                log.warning("worker.stalled", seconds=round(now - due, 1))
            if not self._bus.connected:
                continue
            self._beat()
            if self._stopping and not self._open:
                return

    def _beat(self) -> None:
        # A function of its own: a variable of `_go_on` would reference the last delivery until the next turn.
        for delivery in list(self._open):
            delivery.beat()
            self.sent += 1
