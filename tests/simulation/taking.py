"""How a worker takes jobs from a simulated server and keeps them, by the rules of `inferbus.workers.bus`."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Mapping
from typing import Final

from inferbus.schemas.errors import BusUnavailable, Draining
from inferbus.schemas.subjects import JobClass
from inferbus.workers.bus.interface import Stored
from inferbus.workers.bus.queue.delivery import ACK_TIMEOUT, ACK_TRIES, FORGOTTEN, SUSPECT
from inferbus.workers.bus.queue.fairness import Fair
from tests.support.simulated import Connection

PROBE: Final = 1.0
"""Seconds after which a pull that was to be answered at once is lost."""


class SimulatedDelivery:
    """One delivery of one job; implements `Delivery` by the rules of `inferbus.workers.bus.delivery`."""

    def __init__(
        self, connection: Connection, message: Stored, attempt: int, lane: JobClass, signs: Heartbeats
    ) -> None:
        self._connection = connection
        self._signs = signs
        self._time = connection.server.time
        self.message = message
        self.attempt = attempt
        self.lane = lane
        self.received = self.seen = self._time.now
        self.epoch = connection.epoch
        self.ended = False
        self._stale = self.forgotten = False
        signs.open[id(self)] = self

    @property
    def stale(self) -> bool:
        """See `Delivery`."""
        self._stale = self._stale or self.out_of_touch
        return self._stale

    @property
    def out_of_touch(self) -> bool:
        """Whether its last sign of life is too long ago, as its owner can know."""
        return self._time.now - self.seen > self._signs.ack_wait

    def cut_off(self) -> None:
        """The server went away."""
        self.forgotten = self.forgotten or self._time.now - self.received < FORGOTTEN
        self._stale = self._stale or self.forgotten

    async def ack(self) -> None:
        """See `Delivery`."""
        server, sequence = self._connection.server, self.message.sequence
        await self._end(lambda: server.ack(sequence))

    async def nak(self, delay: float) -> None:
        """See `Delivery`."""
        if self.stale:
            self.drop()
            return
        server, sequence = self._connection.server, self.message.sequence
        await self._end(lambda: server.nak(sequence, self.attempt, delay), tries=1)

    async def term(self, reason: str) -> None:
        """See `Delivery`."""
        await self.ack()

    async def progress(self) -> None:
        """See `Delivery`."""
        self.beat()

    def beat(self) -> None:
        """A sign of life."""
        if self.stale:
            self.drop()
            return
        self.seen = self._time.now
        self._connection.tell(lambda: self._connection.server.progress(self.message.sequence))

    def drop(self) -> None:
        """No more signs of life."""
        self._signs.open.pop(id(self), None)

    async def _end(self, action: Callable[[], None], *, tries: int = ACK_TRIES) -> None:
        self.ended = True
        try:
            for left in reversed(range(tries)):
                try:
                    await self._connection.request(action, timeout=ACK_TIMEOUT)
                    return
                except BusUnavailable:
                    if not left:
                        raise
        finally:
            self.drop()


class Heartbeats:
    """Signs of life of one process, as `inferbus.workers.bus.delivery` gives them."""

    def __init__(self, connection: Connection, *, ack_wait: float) -> None:
        self.ack_wait = ack_wait
        self.open: dict[int, SimulatedDelivery] = {}
        self.suspect_until = 0.0
        self._connection = connection
        self._interval = ack_wait / 3 * 0.9
        connection.listeners.append(self._changed)

    def _changed(self, up: bool) -> None:
        if not up:
            for delivery in list(self.open.values()):
                delivery.cut_off()

    async def run(self) -> None:
        """For ever."""
        loop = asyncio.get_running_loop()
        while True:
            due = loop.time() + self._interval
            await asyncio.sleep(self._interval)
            if loop.time() - due > self.ack_wait / 2:
                self.suspect_until = loop.time() + SUSPECT
            if self._connection.up:
                for delivery in list(self.open.values()):
                    delivery.beat()


class SimulatedQueue:
    """Where a worker's jobs come from: `roles.intake.JobSource` by the rules of `bus.pull`."""

    def __init__(self, connection: Connection, signs: Heartbeats, weights: Mapping[JobClass, int]) -> None:
        self._connection = connection
        self._signs = signs
        self._fair = Fair({str(name): weight for name, weight in weights.items()})
        self._lanes = tuple(weights)
        self.held: deque[SimulatedDelivery] = deque()
        self._changed = asyncio.Event()
        self._stopped = self._asking = False
        connection.arrived = self._arrived
        connection.listeners.append(lambda up: self._changed.set())

    async def take(self) -> SimulatedDelivery:
        """See `Queue`."""
        while True:
            if self._stopped:
                raise Draining("this worker takes no more jobs")
            if self.held:
                return self.held.popleft()
            self._asking = True
            await self._ask()
            self._asking = False

    async def stop(self) -> None:
        """See `Queue`."""
        self._stopped = True
        self._changed.set()
        if self._connection.up and self._asking:
            try:
                self._withdraw()
                await self._connection.flush()
            except BusUnavailable:
                pass
            for _ in range(4):
                # What came before that answer reaches whom it is for.
                await asyncio.sleep(0)
        held, self.held = list(self.held), deque()
        for delivery in held:
            delivery.drop()
        if self._connection.up:
            await asyncio.gather(*(each.nak(0) for each in held), return_exceptions=True)

    async def _ask(self) -> None:
        """Asks class after class without waiting; then waits for whichever has a job first."""
        await self._connection.connected()
        for name in self._fair.order():
            if await self._probe(name) or self.held or self._stopped:
                return
            self._fair.empty(name)
        self._changed.clear()
        if not self._connection.up:
            return
        for lane in self._lanes:
            self._pull(lane, wait=True)
        try:
            await self._changed.wait()
        finally:
            self._withdraw()

    async def _probe(self, lane: str) -> bool:
        server, connection = self._connection.server, self._connection
        job_class = next(each for each in self._lanes if each == lane)
        try:
            found = await connection.request(
                lambda: server.pull(connection, job_class, wait=False), timeout=PROBE
            )
        except BusUnavailable:
            return False
        if found:
            # It comes right behind the answer.
            await asyncio.sleep(0)
            while not self.held and not self._stopped and connection.up:
                self._changed.clear()
                try:
                    async with asyncio.timeout(PROBE):
                        await self._changed.wait()
                except TimeoutError:
                    break
        return bool(found)

    def _pull(self, lane: JobClass, *, wait: bool) -> None:
        server, connection = self._connection.server, self._connection
        connection.tell(lambda: server.pull(connection, lane, wait=wait))

    def _withdraw(self) -> None:
        server, connection = self._connection.server, self._connection
        if connection.up:
            connection.tell(lambda: server.withdraw(connection))

    def _arrived(self, message: Stored, attempt: int, lane: JobClass) -> None:
        self._changed.set()
        if self._connection.server.time.now < self._signs.suspect_until:
            return
        self._fair.picked(lane)
        self.held.append(SimulatedDelivery(self._connection, message, attempt, lane, self._signs))
