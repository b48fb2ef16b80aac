"""The guarded connection to NATS: everything that this process sends or receives goes through one `Bus`.

Its guards, each against something that nats-py does (facts/nats.md §4 has the
evidence): sizes and subjects are checked before a publish, one task writes,
callbacks never raise, reconnecting never ends, a watchdog notices a dead read
loop, leaving a subscription loses nothing, and every wait has a limit.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import secrets
import time
from collections.abc import Callable, Mapping
from typing import Any, Final

import nats.errors
import structlog
from nats.aio.msg import Msg
from nats.js import JetStreamContext

from inferbus.schemas.errors import BusUnavailable
from inferbus.schemas.subjects import Subjects
from inferbus.workers.bus import jetstream, natspy
from inferbus.workers.bus.dial import Events, dial
from inferbus.workers.bus.errors import NoResponders, NotPermitted
from inferbus.workers.bus.frames import check_filter
from inferbus.workers.bus.inbox import Inbox, Inboxes
from inferbus.workers.bus.interface import Stored
from inferbus.workers.bus.message import NO_HEADERS, NO_RESPONDERS, Callback, Message
from inferbus.workers.bus.watchdog import INTERVAL, Watchdog
from inferbus.workers.bus.writer import Writer
from inferbus.workers.config import BusSettings

log = structlog.get_logger()

LINGER: Final = 1.0
"""Seconds for which a subscription that was ended still takes messages. A server that found a listener sends
to it whoever unsubscribes meanwhile, so that a message may come even after the PONG behind the last one."""

SETTLING: Final = 10.0
"""Seconds after a reconnection for which errors may still be due to what was before it."""

TIMEOUT: Final = 5.0
"""Seconds that the server may take to answer."""

_DENIED: Final = re.compile(r'permissions violation for (publish|subscription) to "([^"]+)"', re.IGNORECASE)
"""nats-py gives the server's text in lower case."""


class Subscription:
    """Interest in a subject.

    Attributes:
        subject: What was subscribed to.
        queue: The queue group, or empty.
    """

    def __init__(self, bus: Bus, subject: str, queue: str, callback: Callback) -> None:
        self._bus = bus
        self._callback = callback
        self._sub: Any = None
        self.subject = subject
        self.queue = queue

    async def unsubscribe(self) -> None:
        """Ends the subscription.

        What the server had sent by then reaches the callback before this returns, and what comes late, within
        the next second, as well.
        """
        sub, self._sub = self._sub, None
        if sub is not None:
            await self._bus._leave(sub)

    async def _on_message(self, raw: Msg) -> None:
        message = Message(raw.subject, raw.data, raw.headers or NO_HEADERS, raw.reply)
        try:
            self._callback(message)
        except Exception:  # supervision point: callbacks given to nats-py
            self._bus.callback_errors += 1
            log.exception("bus.callback_failed", subject=self.subject)


class Bus:
    """One connection; implements `Broker`.

    Attributes:
        subjects: The subjects under the configured prefix.
        closed: Set when the connection is gone for good, by `close` or by a fault.
        failure: Why, where it was a fault.
        callback_errors: Exceptions from callbacks, all logged.
        errors: Errors that nats-py told of, all logged.
        denied: Subjects that the server refused.
    """

    def __init__(self, settings: BusSettings) -> None:
        """Not to be called; see `connect`."""
        self.subjects: Subjects = settings.subjects
        self.closed = asyncio.Event()
        self.failure: str | None = None
        self.callback_errors = 0
        self.errors = 0
        self.denied: set[str] = set()
        self._inboxes = Inboxes(settings.inbox_prefix)
        self._waiting: dict[str, set[asyncio.Future[Message]]] = {}
        self._listeners: list[Callable[[bool], None]] = []
        self._connected = asyncio.Event()
        self._since = 0.0
        self._told: set[str] = set()
        self._lingering: dict[Any, asyncio.TimerHandle] = {}
        self._closing = False
        self._supervision: asyncio.Task[None] | None = None
        self._client: natspy.GuardedClient
        self._writer: Writer
        self.watchdog: Watchdog

    @classmethod
    async def connect(cls, settings: BusSettings, *, name: str, watchdog: float = INTERVAL) -> Bus:
        """Connects.

        Args:
            settings: Where to, and as whom.
            name: Shown in the server's list of connections.
            watchdog: Seconds between its questions.

        Raises:
            BusUnavailable: Nothing answers, or it refuses, or is too old; one line says which.
        """
        bus = cls(settings)
        events: Events = {
            "error_cb": bus._on_error,
            "disconnected_cb": bus._on_disconnected,
            "reconnected_cb": bus._on_reconnected,
            "closed_cb": bus._on_closed,
        }
        bus._client = await dial(settings, name=name, events=events)
        bus._writer = Writer(bus._client)
        bus._writer.start()
        bus._set_connected(True)
        bus.watchdog = Watchdog(bus._client, bus._fail, interval=watchdog)
        bus._supervision = asyncio.create_task(bus.watchdog.run(), name="bus-watchdog")
        try:
            await bus.subscribe(bus._inboxes.filter, bus._inboxes.dispatch)
        except BusUnavailable:
            await bus.close()
            raise
        log.info("bus.connected", url=str(bus._client.connected_url and bus._client.connected_url.hostname))
        return bus

    @property
    def nc(self) -> natspy.GuardedClient:
        """nats-py's client, for what `Bus` does not do. Never call `flush` or `publish` on it."""
        return self._client

    @property
    def js(self) -> JetStreamContext:
        """nats-py's JetStream, for tools and tests."""
        return self._client.jetstream()

    @property
    def connected(self) -> bool:
        """Whether the server is there at the moment."""
        return self._connected.is_set()

    @property
    def settled(self) -> bool:
        """Whether an error says something of the server, rather than of a connection that comes and goes.

        What was asked just before the connection was lost is never answered, and a server that has just
        started may have no JetStream yet.
        """
        return self.connected and (self.reconnects == 0 or time.monotonic() - self._since > SETTLING)

    @property
    def max_payload(self) -> int:
        """Largest message in bytes, headers included."""
        return self._writer.max_payload

    @property
    def writer(self) -> Writer:
        """For its counters."""
        return self._writer

    @property
    def reconnects(self) -> int:
        """How often the connection was made anew."""
        return int(self._client.stats["reconnects"])

    def on_change(self, listener: Callable[[bool], None]) -> Callable[[], None]:
        """Calls `listener` with True or False when the server comes or goes; returns what ends that."""
        self._listeners.append(listener)

        def forget() -> None:
            with contextlib.suppress(ValueError):
                self._listeners.remove(listener)

        return forget

    async def until_connected(self) -> None:
        """Returns when the server is there."""
        await self._connected.wait()

    def send(
        self, subject: str, data: bytes, headers: Mapping[str, str] | None = None, *, reply: str = ""
    ) -> None:
        """See `Broker.send`. While NATS is away messages wait; beyond a limit they are counted and gone."""
        self._writer.put(subject, data, headers, reply)

    @property
    def congested(self) -> bool:
        """See `Broker.congested`."""
        return self._writer.congested

    async def ready(self) -> None:
        """See `Broker.ready`."""
        await self._writer.ready()

    async def flush(self, timeout: float = TIMEOUT) -> None:
        """See `Broker.flush`."""
        try:
            async with asyncio.timeout(timeout):
                await self._connected.wait()
                await self._writer.written()
                await self._client.flush(timeout=max(1, round(timeout)))
        except (TimeoutError, nats.errors.Error, OSError) as error:
            raise BusUnavailable(f"NATS did not take everything within {timeout:g} s") from error

    async def subscribe(self, subject: str, callback: Callback, queue: str = "") -> Subscription:
        """Subscribes; on return the server knows. Messages of one subscription come one after the other.

        Raises:
            NotPermitted: Naming the subject.
            InvalidSubject: Not a subject that can be subscribed to.
        """
        subscription = Subscription(self, check_filter(subject), queue, callback)
        try:
            subscription._sub = await self._client.subscribe(
                subject, queue=queue, cb=subscription._on_message, pending_bytes_limit=0
            )
        except nats.errors.Error as error:
            raise BusUnavailable(f"cannot subscribe to {subject}: {error}") from error
        self.denied.discard(_key("subscription", subject))
        try:
            if self.connected:
                await self.flush()
        except BusUnavailable:
            # A connection that was lost meanwhile comes back with all of its subscriptions.
            if self.settled or self.closed.is_set():
                natspy.forget_subscription(self._client, subscription._sub)
                raise
        if _key("subscription", subject) in self.denied:
            await subscription.unsubscribe()
            raise NotPermitted(f"not permitted to subscribe to {subject}")
        return subscription

    def private_subject(self) -> str:
        """The first part of subjects that only this process uses, for subscriptions of one's own."""
        return f"{self._inboxes.prefix}.{secrets.token_hex(11)}"

    def inbox(self, callback: Callback) -> Inbox:
        """A reply subject of one's own for any number of answers; close it when done."""
        return self._inboxes.open(callback)

    def probe_inbox(self, callback: Callable[[str], None]) -> Inbox:
        """A reply subject that tells when a message found nobody.

        A message sent with it as its reply comes back as status 503 when nobody listens on its subject;
        `callback` gets that subject. With somebody there, nothing comes back.
        """

        def on_message(message: Message) -> None:
            if message.status == NO_RESPONDERS and (subject := message.headers.get("Nats-Subject")):
                callback(subject)

        return self._inboxes.open(on_message)

    async def request(
        self,
        subject: str,
        data: bytes = b"",
        headers: Mapping[str, str] | None = None,
        timeout: float = TIMEOUT,
    ) -> Message:
        """Sends a message and returns the first answer.

        Raises:
            NoResponders: Nobody listens.
            NotPermitted: Naming the subject.
            BusUnavailable: No answer in time.
        """
        answer: asyncio.Future[Message] = asyncio.get_running_loop().create_future()

        def on_message(message: Message) -> None:
            if not answer.done():
                answer.set_result(message)

        key = _key("publish", subject)
        self._waiting.setdefault(key, set()).add(answer)
        inbox = self._inboxes.open(on_message)
        try:
            async with asyncio.timeout(timeout):
                # Nothing is queued while NATS is away: it would be sent long after its sender gave up.
                await self._connected.wait()
                self.send(subject, data, headers, reply=inbox.subject)
                message = await answer
        except TimeoutError:
            away = "" if self.connected else ": NATS is away"
            raise BusUnavailable(f"no answer on {subject} within {timeout:g} s{away}") from None
        finally:
            inbox.close()
            self._waiting[key].discard(answer)
            if not self._waiting[key]:
                del self._waiting[key]
        if message.status == NO_RESPONDERS:
            raise NoResponders(f"nobody listens on {subject}")
        return message

    async def store(
        self,
        subject: str,
        data: bytes,
        headers: Mapping[str, str] | None = None,
        *,
        expect: int | None = None,
        timeout: float = TIMEOUT,
    ) -> int | None:
        """See `Broker.store`."""
        return await jetstream.store(self, subject, data, headers, expect=expect, timeout=timeout)

    async def last(self, stream: str, subject: str) -> Stored | None:
        """See `Broker.last`."""
        return await jetstream.last(self, stream, subject)

    async def read(self, stream: str, subject: str) -> list[Stored]:
        """See `Broker.read`."""
        return await jetstream.read(self, stream, subject)

    async def close(self, timeout: float = 2.0) -> None:
        """Sends what is queued, as far as that is possible in time, and closes."""
        if self._closing:
            await self.closed.wait()
            return
        self._closing = True
        if self._supervision is not None:
            self._supervision.cancel()
        await self._writer.close(timeout if self.connected else 0.0)
        await self._close_client(timeout)
        self._set_connected(False)
        self.closed.set()

    async def _close_client(self, timeout: float) -> None:
        try:
            async with asyncio.timeout(timeout):
                await self._client.close()
        except (TimeoutError, nats.errors.Error, OSError) as error:
            log.warning("bus.close_failed", error=str(error) or type(error).__name__)
            natspy.abort_socket(self._client)

    async def _fail(self, reason: str) -> None:
        """The connection is gone for good by a fault."""
        if self.closed.is_set():
            return
        self.failure = None if self._closing else reason
        if self.failure:
            log.error("bus.failed", reason=reason)
        self._set_connected(False)
        self.closed.set()
        if not self._client.is_closed:
            await self._close_client(2.0)

    def _set_connected(self, connected: bool) -> None:
        if connected == self._connected.is_set():
            return
        if connected:
            self._since = time.monotonic()
            self._connected.set()
        else:
            self._connected.clear()
        self._writer.set_connected(connected)
        for listener in list(self._listeners):
            try:
                listener(connected)
            except Exception:  # supervision point: callbacks given to nats-py
                self.callback_errors += 1
                log.exception("bus.callback_failed", subject="connection")

    async def _leave(self, sub: Any) -> None:
        """Unsubscribes while connected, then waits a while; else forgets it, so that it is not made anew."""
        lingers, before = False, self.reconnects
        try:
            if self.connected:
                async with asyncio.timeout(TIMEOUT):
                    lingers = await natspy.end_interest(self._client, sub, self.flush)
                    if not lingers:
                        await sub.drain()
                    elif self.reconnects != before:
                        # It was made anew meanwhile, and nobody would end it.
                        lingers = False
                        await sub.unsubscribe()
            else:
                await sub.unsubscribe()
        except (BusUnavailable, TimeoutError, nats.errors.Error, OSError) as error:
            log.debug("bus.unsubscribe_failed", subject=sub.subject, error=str(error))
        finally:
            if lingers and self.connected:
                self._lingering[sub] = asyncio.get_running_loop().call_later(LINGER, self._forget, sub)
            else:
                natspy.forget_subscription(self._client, sub)

    def _forget(self, sub: Any) -> None:
        self._lingering.pop(sub).cancel()
        natspy.forget_subscription(self._client, sub)

    async def _on_error(self, error: Exception) -> None:
        # Must not raise: an exception from here ends nats-py's read loop (facts 4.2).
        self.errors += 1
        found = _DENIED.search(str(error))
        if found is None:
            text = str(error) or type(error).__name__
            # While NATS is away every try fails; each reason is told once.
            tell = log.warning if self.connected or text not in self._told else log.debug
            self._told.add(text)
            tell("bus.error", error=text, kind=type(error).__name__)
            return
        key = _key(found[1], found[2])
        if key not in self.denied and len(self.denied) < 1024:
            self.denied.add(key)
            log.error("bus.not_permitted", action=found[1], subject=found[2])
        for waiting in self._waiting.get(key, ()):
            if not waiting.done():
                waiting.set_exception(NotPermitted(f"not permitted to publish to {found[2]}"))

    async def _on_disconnected(self) -> None:
        if not self._closing:
            log.warning("bus.disconnected", error=str(self._client.last_error or ""))
        self._set_connected(False)
        for sub in list(self._lingering):
            # Or it would be made anew, with nobody to end it.
            self._forget(sub)

    async def _on_reconnected(self) -> None:
        self.denied.clear()
        self._told.clear()
        log.info("bus.reconnected", times=self.reconnects)
        self._set_connected(True)

    async def _on_closed(self) -> None:
        await self._fail(str(self._client.last_error or "the client closed the connection"))


def _key(action: str, subject: str) -> str:
    return f"{action.lower()} {subject.lower()}"
