"""The registry of workers: each announces itself in a key-value bucket, and sees the others there.

Entries of the bucket (ADR-8) expire. Changes arrive as plain messages on the
bucket's subjects; entries from before, and those missed while the connection
was lost, are read from the stream. That needs no ordered consumer, which would
have to be made again after a restart of the server.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Final

import msgspec
import structlog

from inferbus.schemas import codec, fleet
from inferbus.schemas.errors import BusUnavailable, CallerError, InvalidRequest
from inferbus.schemas.fleet import Load, Role, State, WorkerInfo
from inferbus.schemas.subjects import escape
from inferbus.workers.bus.connection.bus import Bus
from inferbus.workers.bus.connection.message import Message
from inferbus.workers.bus.connection.subscription import Subscription
from inferbus.workers.bus.interface import Stored
from inferbus.workers.bus.jetstream import layout
from inferbus.workers.bus.jetstream.client import JetStream
from inferbus.workers.config import WorkerSettings

log = structlog.get_logger()

OPERATION: Final = "KV-Operation"
DELETE: Final = "DEL"

Changed = Callable[[], None]


def key(info: WorkerInfo) -> str:
    """A worker's key in the bucket."""
    return f"{escape(info.model)}.{escape(info.worker)}"


def entry_subject(name: str = ">") -> str:
    """The subject of an entry of the bucket by its key, which may hold wildcards."""
    return f"$KV.{fleet.BUCKET}.{name}"


def parse_entry(entry: Stored | Message) -> WorkerInfo | None:
    """The worker of an entry of the bucket; None where the entry was deleted.

    Raises:
        CallerError: Not an announcement, or one of an incompatible version.
    """
    if entry.forwarded:
        raise InvalidRequest("no announcement: the server sent it here as the answer to another message")
    if not entry.data or OPERATION in entry.headers:
        return None
    return codec.decode(entry.data, WorkerInfo)


class Roster:
    """The workers that are announced now, of one model or of all.

    Args:
        bus: The connection.
        model: Only workers of this model.
        ttl: Seconds after its last announcement after which a worker is dropped.
        clock: Monotonic seconds.
    """

    def __init__(
        self,
        bus: Bus,
        model: str | None = None,
        *,
        ttl: float = layout.ANNOUNCE_TTL,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._bus = bus
        self._filter = entry_subject(f"{escape(model)}.*" if model is not None else "*.*")
        self._ttl = ttl
        self._clock = clock
        self._entries: dict[str, tuple[WorkerInfo, float]] = {}
        self._listeners: list[Changed] = []
        self._updated = asyncio.Event()
        self._stale = asyncio.Event()
        self._subscription: Subscription | None = None
        self._forget: Callable[[], None] | None = None
        self._task: asyncio.Task[None] | None = None

    def workers(self, *, role: Role | None = None) -> list[WorkerInfo]:
        """The workers that are announced, in a stable order."""
        fresh = self._clock() - self._ttl
        return [
            info
            for _, (info, seen) in sorted(self._entries.items())
            if seen > fresh and (role is None or info.role == role)
        ]

    def on_change(self, listener: Changed) -> None:
        """Calls `listener` after every change; it must be quick."""
        self._listeners.append(listener)

    async def wait_for(
        self, predicate: Callable[[list[WorkerInfo]], bool], timeout: float | None = None
    ) -> list[WorkerInfo]:
        """Returns the workers once `predicate` holds for them.

        Raises:
            TimeoutError: Not in time.
        """
        async with asyncio.timeout(timeout):
            while not predicate(workers := self.workers()):
                self._updated.clear()
                await self._updated.wait()
        return workers

    def drop(self, info: WorkerInfo) -> None:
        """Leaves a worker out until it announces itself again: it does not answer."""
        if self._entries.pop(entry_subject(key(info)), None) is not None:
            log.info("registry.dropped", worker=info.worker, role=info.role)
            self._notify()

    async def __aenter__(self) -> Roster:
        self._subscription = await self._bus.subscribe(self._filter, self._apply)
        self._forget = self._bus.on_change(lambda connected: self._stale.set() if connected else None)
        await self._read()
        self._task = asyncio.create_task(self._run(), name="registry-watch")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._task is not None:
            self._task.cancel()
        if self._forget is not None:
            self._forget()
        if self._subscription is not None:
            await self._subscription.unsubscribe()

    async def _run(self) -> None:
        while True:
            try:
                async with asyncio.timeout(self._ttl / 4):
                    await self._stale.wait()
            except TimeoutError:
                self._expire()
                continue
            self._stale.clear()
            try:
                await self._read()
            except BusUnavailable as error:
                # Announcements still arrive; workers whose announcements were missed expire.
                log.warning("registry.not_read", reason=error.message)

    async def _read(self) -> None:
        for stored in await JetStream(self._bus).read(layout.WORKERS, self._filter):
            self._apply(stored)
        self._expire()

    def _apply(self, entry: Stored | Message) -> None:
        subject = entry.subject
        try:
            info = parse_entry(entry)
        except CallerError as error:
            log.warning("registry.unreadable", subject=subject, error=error.message)
            return
        if info is None:
            changed = self._entries.pop(subject, None) is not None
        else:
            before = self._entries.get(subject)
            self._entries[subject] = (info, self._clock())
            changed = before is None or before[0] != info
        if changed:
            self._notify()

    def _expire(self) -> None:
        oldest = self._clock() - self._ttl
        gone = [subject for subject, (_, seen) in self._entries.items() if seen <= oldest]
        for subject in gone:
            info, _ = self._entries.pop(subject)
            log.info("registry.expired", worker=info.worker, role=info.role)
        if gone:
            self._notify()

    def _notify(self) -> None:
        self._updated.set()
        for listener in self._listeners:
            listener()


class Registry:
    """Announces one worker, and knows the others of its model.

    Args:
        bus: The connection.
        info: Of this worker; its load is asked for before every announcement.
        settings: For the interval.
        load: The load now.
    """

    def __init__(
        self,
        bus: Bus,
        info: WorkerInfo,
        *,
        settings: WorkerSettings,
        load: Callable[[], Awaitable[Load]],
    ) -> None:
        self._bus = bus
        self._info = info
        self._load = load
        self._interval = settings.announce_interval
        self._roster = Roster(bus, info.model)
        self._task: asyncio.Task[None] | None = None

    @property
    def info(self) -> WorkerInfo:
        """As last announced."""
        return self._info

    @property
    def roster(self) -> Roster:
        """The others, and this one."""
        return self._roster

    def workers(self, *, role: Role | None = None) -> list[WorkerInfo]:
        """The announced workers of this model."""
        return self._roster.workers(role=role)

    def on_change(self, listener: Changed) -> None:
        """See `Roster.on_change`."""
        self._roster.on_change(listener)

    async def wait_for(
        self, predicate: Callable[[list[WorkerInfo]], bool], timeout: float | None = None
    ) -> list[WorkerInfo]:
        """See `Roster.wait_for`."""
        return await self._roster.wait_for(predicate, timeout)

    def drop(self, info: WorkerInfo) -> None:
        """See `Roster.drop`."""
        self._roster.drop(info)

    async def announce(self, state: State, *, reason: str | None = None) -> None:
        """Announces a new state at once."""
        self._info = msgspec.structs.replace(self._info, state=state, reason=reason)
        await self._publish()

    @staticmethod
    async def announce_once(bus: Bus, info: WorkerInfo) -> None:
        """Announces a worker once, one that could not start for example; the entry expires by itself.

        Raises:
            BusUnavailable: The bucket did not take it.
        """
        await JetStream(bus).store(entry_subject(key(info)), codec.encode(info))

    async def __aenter__(self) -> Registry:
        await self._roster.__aenter__()
        try:
            # The first announcement is confirmed, so that a missing permission ends the start.
            await self.announce_once(self._bus, self._info)
        except BusUnavailable:
            await self._roster.__aexit__(None, None, None)
            raise
        self._task = asyncio.create_task(self._run(), name="registry-announce")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})
        await self._roster.__aexit__(kind, error, trace)
        if self._info.state != "failed" and self._bus.connected:
            self._bus.send(entry_subject(key(self._info)), b"", {OPERATION: DELETE})

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(self._interval)
            await self._publish()

    async def _publish(self) -> None:
        try:
            load = await self._load()
        except Exception:  # supervision point: an old load is better than no announcement
            log.exception("registry.load_failed")
        else:
            self._info = msgspec.structs.replace(self._info, load=load)
        # Not while NATS is away: it would be queued, and arrive late.
        if self._bus.connected:
            self._bus.send(entry_subject(key(self._info)), codec.encode(self._info))
