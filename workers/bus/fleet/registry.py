"""The registry of workers: each announces itself in a key-value bucket, and sees the others there.

Entries of the bucket (ADR-8) expire. Changes arrive as plain messages on the
bucket's subjects; entries from before, and those missed while the connection
was lost, are read from the stream. That needs no ordered consumer, which would
have to be made again after a restart of the server.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from types import TracebackType
from typing import Final

import msgspec
import structlog

from inferbus.schemas import codec
from inferbus.schemas.errors import BusUnavailable, CallerError, InvalidRequest, WorkerError
from inferbus.schemas.fleet import Load, Role, State, WorkerInfo
from inferbus.schemas.subjects import Subjects, escape
from inferbus.workers.bus.connection.bus import Bus
from inferbus.workers.bus.connection.message import Message
from inferbus.workers.bus.connection.subscription import Subscription
from inferbus.workers.bus.errors import NoResponders, NotPermitted
from inferbus.workers.bus.interface import Stored
from inferbus.workers.bus.jetstream import layout
from inferbus.workers.bus.jetstream.client import JetStream
from inferbus.workers.config import WorkerSettings
from inferbus.workers.observe import defects

log = structlog.get_logger()

OPERATION: Final = "KV-Operation"
DELETE: Final = "DEL"

LARGEST: Final = 65536
"""Bytes of an announcement; one of ours has about a thousand."""

UNREADABLE: Final = 1024
"""Entries whose fault is logged once; those beyond are not logged."""

ANSWER_SECONDS: Final = 1.0
"""The server says at once that nobody listens; a subject on which it says nothing has a listener."""

CLAIMS: Final = 10
"""How often an id is tried for; every failed try means that somebody else announced under it meanwhile."""

Changed = Callable[[], None]


class WorkerExists(WorkerError):
    """Another process is a worker with the same id."""


def key(info: WorkerInfo) -> str:
    """A worker's key in the bucket."""
    return f"{escape(info.model)}.{escape(info.worker)}"


def entry_subject(subjects: Subjects, name: str = ">") -> str:
    """The subject of an entry of the bucket by its key, which may hold wildcards."""
    return layout.key(subjects, layout.WORKERS, name)


def parse_entry(entry: Stored | Message) -> WorkerInfo | None:
    """The worker of an entry of the bucket; None where the entry was deleted.

    Raises:
        CallerError: Not an announcement, one of an incompatible version, or one with names that a worker
            cannot have: they become subjects and headers, and stand under the key that they give.
    """
    if entry.forwarded:
        raise InvalidRequest("no announcement: the server sent it here as the answer to another message")
    if not entry.data or OPERATION in entry.headers:
        return None
    if len(entry.data) > LARGEST:
        raise InvalidRequest(f"an announcement has at most {LARGEST} bytes")
    info = codec.decode(entry.data, WorkerInfo)
    if not (info.worker.isprintable() and info.model.isprintable()):
        raise InvalidRequest("worker and model must be printable text")
    if entry.subject.split(".", 2)[-1] != key(info):
        raise InvalidRequest("it stands under the key of another worker")
    return info


@contextlib.asynccontextmanager
async def holding(bus: Bus, info: WorkerInfo) -> AsyncIterator[None]:
    """Announces a worker for the first time, and holds its id while the block runs.

    The entry is written only if nobody else has written it since it was read, so of two workers that start
    at the same moment one goes on. An entry that is there is another worker's as long as the process that it
    names listens; one that was killed does not, so its successor need not wait until the entry expires.

    Raises:
        WorkerExists: Another process has this id.
        BusUnavailable: The bucket did not take the announcement.
    """
    listening = await bus.subscribe(bus.subjects.worker(info.worker, info.incarnation), lambda message: None)
    try:
        await _claim(bus, info)
        yield
    finally:
        await listening.unsubscribe()


def announce(bus: Bus, info: WorkerInfo) -> None:
    """Announces a worker, unless NATS is away: the announcement would be queued, and arrive late."""
    if bus.connected:
        bus.send(entry_subject(bus.subjects, key(info)), codec.encode(info))


def withdraw(bus: Bus, info: WorkerInfo) -> None:
    """Ends the announcement of a worker."""
    if bus.connected:
        bus.send(entry_subject(bus.subjects, key(info)), b"", {OPERATION: DELETE})


async def _claim(bus: Bus, info: WorkerInfo) -> None:
    broker, subject = JetStream(bus), entry_subject(bus.subjects, key(info))
    for _ in range(CLAIMS):
        expected = 0
        # Of every model: an id is one worker's.
        for entry in await broker.read(
            layout.WORKERS, entry_subject(bus.subjects, f"*.{escape(info.worker)}")
        ):
            if entry.subject == subject:
                expected = entry.sequence
            other = _readable(entry)
            if other and other.incarnation != info.incarnation and await _lives(bus, other):
                raise WorkerExists(
                    f"the worker id {info.worker!r} is taken: a {other.role} worker of {other.model!r} on "
                    f"host {other.host!r} has it; every worker needs an id of its own (--worker)"
                )
        if await broker.store(subject, codec.encode(info), expect=expected) is not None:
            return
    raise BusUnavailable(
        f"the worker id {info.worker!r} could not be taken: others announce themselves under it"
    )


async def _lives(bus: Bus, info: WorkerInfo) -> bool:
    """Whether the process of an announcement is there. One of an older version has its service only."""
    subject = (
        bus.subjects.worker(info.worker, info.incarnation)
        if info.incarnation
        else f"$SRV.PING.inferbus-{info.role}.{escape(info.worker)}"
    )
    try:
        await bus.request(subject, timeout=ANSWER_SECONDS)
    except NoResponders:
        return False
    except NotPermitted:
        raise
    except BusUnavailable:
        if not bus.connected:
            raise
    return True


def _readable(entry: Stored) -> WorkerInfo | None:
    with contextlib.suppress(CallerError):
        return parse_entry(entry)
    return None


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
        self._filter = entry_subject(bus.subjects, f"{escape(model)}.*" if model is not None else "*.*")
        self._ttl = ttl
        self._clock = clock
        self._entries: dict[str, tuple[WorkerInfo, float]] = {}
        self._unreadable: set[str] = set()
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

    def find(self, info: WorkerInfo) -> WorkerInfo | None:
        """What is announced now under the key of a worker."""
        entry = self._entries.get(entry_subject(self._bus.subjects, key(info)))
        return entry[0] if entry is not None else None

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
        if self._entries.pop(entry_subject(self._bus.subjects, key(info)), None) is not None:
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
            if subject not in self._unreadable and len(self._unreadable) < UNREADABLE:
                self._unreadable.add(subject)
                log.warning("registry.unreadable", subject=subject, error=error.message)
            return
        self._unreadable.discard(subject)
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

    Attributes:
        replaced: Set when a process that began later announces itself under the same id. That can happen
            only after this one was out of touch for so long that its announcement had expired.
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
        self._held = contextlib.AsyncExitStack()
        self._task: asyncio.Task[None] | None = None
        self.replaced = asyncio.Event()

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

    def note(self, reason: str | None) -> None:
        """Announces, next time, what keeps this worker from working as it should; None: nothing does."""
        self._info = msgspec.structs.replace(self._info, reason=reason)

    async def __aenter__(self) -> Registry:
        async with contextlib.AsyncExitStack() as entered:
            await entered.enter_async_context(self._roster)
            # The first announcement is confirmed, so that a missing permission ends the start.
            await entered.enter_async_context(holding(self._bus, self._info))
            self._held = entered.pop_all()
        self._roster.on_change(self._look_for_successor)
        self._task = asyncio.create_task(self._run(), name="registry-announce")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})
        await self._held.__aexit__(kind, error, trace)
        if self._info.state != "failed" and not self.replaced.is_set():
            withdraw(self._bus, self._info)

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(self._interval)
            await self._publish()

    async def _publish(self) -> None:
        try:
            load = await self._load()
        except Exception:  # supervision point: an old load is better than no announcement
            defects.exception("registry.load_failed")
        else:
            self._info = msgspec.structs.replace(self._info, load=load)
        if not self.replaced.is_set():
            announce(self._bus, self._info)

    def _look_for_successor(self) -> None:
        other, own = self._roster.find(self._info), self._info
        # Both sides compare the same values, so exactly one of two gives way.
        if (
            other is not None
            and other.incarnation not in ("", own.incarnation)
            and (other.started, other.incarnation) > (own.started, own.incarnation)
            and not self.replaced.is_set()
        ):
            log.error("registry.replaced", host=other.host)
            self.replaced.set()
