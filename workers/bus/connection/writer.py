"""The one task that writes to NATS.

nats-py catches `CancelledError` inside `publish`: cancelling a task that is busy
publishing had no effect in 40 of 40 trials. So only this task waits inside
nats-py's publishing, and it is never cancelled; all others append to a queue.
The queue also makes one write of everything sent within one turn of the event
loop.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from collections.abc import Mapping
from typing import Any, Final

import nats.errors
import structlog

from inferbus.workers.bus.connection import natspy
from inferbus.workers.bus.connection.frames import MARGIN, payload_size, publish_frame
from inferbus.workers.observe import defects

log = structlog.get_logger()

HIGH_WATER: Final = 4 * 1024 * 1024
"""Bytes queued from which on `ready` waits, until a quarter is left."""

LIMIT: Final = 64 * 1024 * 1024
"""Bytes queued beyond which messages are dropped and counted: NATS is away, and callers do not wait."""

BATCH: Final = 256 * 1024
"""Bytes handed over in one step; small, since a lost connection loses them."""


class Writer:
    """A queue of frames, and the task that hands them to the client.

    Attributes:
        max_payload: Largest message in bytes, headers included.
        sent: Messages handed to the client.
        sent_bytes: Their bytes.
        dropped: Messages that found the queue full.
    """

    def __init__(self, client: Any, *, limit: int = LIMIT, high_water: int = HIGH_WATER) -> None:
        self._client = client
        self._limit = limit
        self._high_water = high_water
        self._low_water = high_water // 4
        self._frames: deque[bytes] = deque()
        self._arguments: deque[tuple[str, bytes, Mapping[str, str] | None, str]] = deque()
        self._queued = 0
        self._asleep = False
        self._wake = asyncio.Event()
        self._low = asyncio.Event()
        self._low.set()
        self._barriers: deque[tuple[int, asyncio.Future[None]]] = deque()
        self._put = 0
        self._taken = 0
        self._connected = asyncio.Event()
        self._closing = False
        self._batches = natspy.can_write_batches(client)
        self._task: asyncio.Task[None] | None = None
        self.max_payload = int(client.max_payload) - MARGIN
        self.sent = 0
        self.sent_bytes = 0
        self.dropped = 0

    @property
    def queued(self) -> int:
        """Bytes not yet handed to the client."""
        return self._queued

    def start(self) -> None:
        """Begins writing."""
        self._task = asyncio.create_task(self._run(), name="bus-writer")

    def set_connected(self, connected: bool) -> None:
        """While not connected, nothing is handed to the client, whose own buffer is small and may be lost."""
        if not connected:
            self._connected.clear()
            return
        if (now := int(self._client.max_payload) - MARGIN) != self.max_payload:
            self._adapt(now)
        self._connected.set()

    def put(self, subject: str, data: bytes, headers: Mapping[str, str] | None, reply: str) -> None:
        """Queues one message; see `publish_frame` for what it raises."""
        frame = publish_frame(subject, data, headers, reply, self.max_payload)
        size = self._queued + len(frame)
        if size > self._limit:
            self._drop(1)
            return
        self._queued = size
        self._put += 1
        self._frames.append(frame)
        if not self._batches:
            self._arguments.append((subject, data, headers, reply))
        if size > self._high_water:
            self._low.clear()
        if self._asleep:
            self._rouse()

    @property
    def congested(self) -> bool:
        """Whether `ready` would wait."""
        return not self._low.is_set()

    async def ready(self) -> None:
        """Waits until less than the low-water mark is queued, if the high-water mark was passed."""
        if not self._low.is_set():
            await self._low.wait()

    def written(self) -> asyncio.Future[None]:
        """Done when everything that was put so far is on the socket."""
        barrier: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._barriers.append((self._put, barrier))
        self._rouse()
        return barrier

    async def close(self, timeout: float) -> None:
        """Ends the task when the queue is empty or after `timeout`. It is not cancelled; see the module."""
        if self._task is None:
            return
        self._closing = True
        self._rouse()
        await asyncio.wait({self._task}, timeout=timeout)
        # It will not be connected again: the task and all that wait for it must end.
        self._frames.clear()
        self._arguments.clear()
        self._connected.set()
        self._low.set()

    def _rouse(self) -> None:
        self._asleep = False
        self._wake.set()

    def _drop(self, count: int) -> None:
        if self.dropped == 0:
            log.warning("bus.dropping", queued=self._queued, limit=self._limit)
        self.dropped += count

    def _adapt(self, max_payload: int) -> None:
        """Drops queued messages over another server's limit: one of them would cost the connection."""
        self.max_payload = max_payload
        kept = [payload_size(frame) <= max_payload for frame in self._frames]
        if all(kept):
            return
        self._drop(kept.count(False))
        self._taken += kept.count(False)
        self._frames = deque(itertools.compress(self._frames, kept))
        self._arguments = deque(itertools.compress(self._arguments, kept))
        self._queued = sum(map(len, self._frames))

    async def _run(self) -> None:
        while True:
            if self._barriers and self._barriers[0][0] <= self._taken:
                await self._pass()
                # There may be another one by now, whose event is cleared below.
                continue
            if not self._frames:
                if self._closing:
                    return
                self._wake.clear()
                self._asleep = True
                await self._wake.wait()
                self._asleep = False
                continue
            if not self._client.is_connected and not self._client.is_closed:
                # The client reports a lost connection only once its socket is closed.
                self._connected.clear()
            if not self._connected.is_set():
                await self._connected.wait()
                continue
            batch, count = self._take()
            await self._write(batch, count)
            self.sent += count
            self.sent_bytes += len(batch)

    def _take(self) -> tuple[bytes, int]:
        """As many frames as make a batch, joined."""
        frames, taken = [], 0
        while self._frames and taken < BATCH:
            frame = self._frames.popleft()
            taken += len(frame)
            frames.append(frame)
        self._queued -= taken
        self._taken += len(frames)
        if self._queued <= self._low_water and not self._low.is_set():
            self._low.set()
        return (frames[0] if len(frames) == 1 else b"".join(frames)), len(frames)

    async def _pass(self) -> None:
        """Completes barriers; here, since only this task waits inside nats-py."""
        reached = []
        while self._barriers and self._barriers[0][0] <= self._taken:
            reached.append(self._barriers.popleft()[1])
        try:
            await natspy.write_out(self._client)
        except nats.errors.Error as error:
            log.debug("bus.write_failed", error=str(error))
        for barrier in reached:
            if not barrier.done():
                barrier.set_result(None)

    async def _write(self, batch: bytes, count: int) -> None:
        try:
            if self._batches:
                await natspy.write_batch(self._client, batch)
                return
            for _ in range(count):
                subject, data, headers, reply = self._arguments.popleft()
                await self._client.publish(subject, data, reply=reply, headers=headers)
        except nats.errors.Error as error:
            # Closed for good, which the bus reports. `send` promises delivery at most once.
            log.warning("bus.write_failed", error=str(error))
        except Exception:  # supervision point: without this task nothing is sent any more
            defects.exception("bus.write_failed")
