"""Who is here: every worker announces itself in a key-value bucket, and sees the others there.

The bucket (ADR-8) forgets a worker that stays silent. Changes arrive as plain
messages on the bucket's subjects; what was there before, and what a lost
connection swallowed, is read anew. No ordered consumer is needed for that, and
none has to be repaired after a restart of the server.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Final

import msgspec
import structlog

from inferbus.schemas import fleet
from inferbus.schemas.errors import BusUnavailable
from inferbus.schemas.fleet import Load, Role, State, WorkerInfo
from inferbus.schemas.subjects import escape
from inferbus.workers.bus.connection.bus import Bus, Subscription
from inferbus.workers.bus.connection.message import Message
from inferbus.workers.bus.jetstream import layout
from inferbus.workers.config import WorkerSettings

log = structlog.get_logger()

OPERATION: Final = "KV-Operation"
DELETE: Final = "DEL"

_decoder: Final = msgspec.json.Decoder(WorkerInfo)
_encoder: Final = msgspec.json.Encoder()

Changed = Callable[[], None]


def key(info: WorkerInfo) -> str:
    """A worker's key in the bucket."""
    return f"{escape(info.model)}.{escape(info.worker)}"


def _subject(name: str) -> str:
    return f"$KV.{fleet.BUCKET}.{name}"


class Roster:
    """The workers that are announced now, of one model or of all.

    Args:
        bus: The connection.
        model: Only workers of this model.
        ttl: Seconds after which a silent worker is dropped, should nobody tell.
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
        self._filter = _subject(f"{escape(model)}.*" if model is not None else "*.*")
        self._ttl = ttl
        self._clock = clock
        self._entries: dict[str, tuple[WorkerInfo, float]] = {}
        self._listeners: list[Changed] = []
        self._news = asyncio.Event()
        self._stale = asyncio.Event()
        self._subscription: Subscription | None = None
        self._forget: Callable[[], None] | None = None
        self._task: asyncio.Task[None] | None = None

    def workers(self, *, role: Role | None = None) -> list[WorkerInfo]:
        """Who is here, in a stable order."""
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
            while not predicate(found := self.workers()):
                self._news.clear()
                await self._news.wait()
        return found

    def drop(self, info: WorkerInfo) -> None:
        """Takes a worker for gone until it announces itself again: nobody is where it should be."""
        if self._entries.pop(_subject(key(info)), None) is not None:
            log.info("registry.dropped", worker=info.worker, role=info.role)
            self._tell()

    async def __aenter__(self) -> Roster:
        self._subscription = await self._bus.subscribe(self._filter, self._arrived)
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
                # Announcements go on arriving; those that are missing expire.
                log.warning("registry.not_read", reason=error.message)

    async def _read(self) -> None:
        for stored in await self._bus.read(layout.WORKERS, self._filter):
            self._apply(stored.subject, stored.data, deleted=stored.headers.get(OPERATION) is not None)
        self._expire()

    def _arrived(self, message: Message) -> None:
        self._apply(message.subject, message.data, deleted=message.headers.get(OPERATION) is not None)

    def _apply(self, subject: str, data: bytes, *, deleted: bool) -> None:
        if deleted:
            changed = self._entries.pop(subject, None) is not None
        else:
            try:
                info = _decoder.decode(data)
            except msgspec.MsgspecError as error:
                # A newer worker, or a stranger: not one to work with.
                log.warning("registry.unreadable", subject=subject, error=str(error))
                return
            before = self._entries.get(subject)
            self._entries[subject] = (info, self._clock())
            changed = before is None or before[0] != info
        if changed:
            self._tell()

    def _expire(self) -> None:
        oldest = self._clock() - self._ttl
        gone = [subject for subject, (_, seen) in self._entries.items() if seen <= oldest]
        for subject in gone:
            info, _ = self._entries.pop(subject)
            log.info("registry.expired", worker=info.worker, role=info.role)
        if gone:
            self._tell()

    def _tell(self) -> None:
        self._news.set()
        for listener in self._listeners:
            listener()


class Registry:
    """Announces one worker, and knows the others of its model.

    Args:
        bus: The connection.
        info: Of this worker; its load is taken anew for every announcement.
        settings: For the interval.
        load: Tells the load now.
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
        """Who is here, of this model."""
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
        """Tells a new state at once."""
        self._info = msgspec.structs.replace(self._info, state=state, reason=reason)
        await self._publish()

    @staticmethod
    async def announce_once(bus: Bus, info: WorkerInfo) -> None:
        """Announces a worker that will not stay, one that could not start for example; it expires by itself.

        Raises:
            BusUnavailable: The bucket did not take it.
        """
        await bus.store(_subject(key(info)), _encoder.encode(info))

    async def __aenter__(self) -> Registry:
        await self._roster.__aenter__()
        try:
            # The first one is confirmed, so that a missing permission ends the start.
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
            self._bus.send(_subject(key(self._info)), b"", {OPERATION: DELETE})

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(self._interval)
            await self._publish()

    async def _publish(self) -> None:
        try:
            load = await self._load()
        except Exception:  # supervision point: a worker without figures is better than one that vanishes
            log.exception("registry.load_failed")
        else:
            self._info = msgspec.structs.replace(self._info, load=load)
        # Not while NATS is away: what is queued then would arrive stale, and the next one comes soon.
        if self._bus.connected:
            self._bus.send(_subject(key(self._info)), _encoder.encode(self._info))
