"""The guarded connection to NATS: everything that this process sends or receives goes through one `Bus`.

Each guard is against something that nats-py does; the module named has the reason. Sizes and subjects are
checked before a publish (`frames`), one task writes (`writer`), callbacks never raise and unsubscribing loses
no message (`subscription`), reconnecting never ends (`dial`), a watchdog notices a dead read loop
(`watchdog`), and every wait has a limit.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import secrets
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from typing import Final

import nats.errors
import structlog
from nats.js import JetStreamContext

from inferbus.schemas.errors import BusUnavailable
from inferbus.schemas.subjects import Subjects
from inferbus.workers.bus.connection import natspy
from inferbus.workers.bus.connection.dial import Events, dial
from inferbus.workers.bus.connection.frames import check_filter
from inferbus.workers.bus.connection.inbox import Inbox, Inboxes
from inferbus.workers.bus.connection.message import NO_RESPONDERS, Callback, Message
from inferbus.workers.bus.connection.permissions import Permissions, parse_refusal
from inferbus.workers.bus.connection.requests import Requests
from inferbus.workers.bus.connection.subscription import Subscription, Subscriptions
from inferbus.workers.bus.connection.watchdog import INTERVAL, Watchdog
from inferbus.workers.bus.connection.writer import Writer
from inferbus.workers.bus.errors import NoResponders, NotPermitted
from inferbus.workers.config import BusSettings
from inferbus.workers.observe import defects

log = structlog.get_logger()

SETTLING: Final = 10.0
"""Seconds after a reconnection for which errors may still be due to what was before it."""

TIMEOUT: Final = 5.0
"""Seconds that the server may take to answer."""

REFUSED_FOR: Final = 60.0
"""Seconds for which a login that is refused is tried again: an expired one may be renewed a little late."""


class Refusals:
    """For how long the login has been refused."""

    def __init__(self) -> None:
        self._first = self._last = -math.inf

    def too_long(self, now: float) -> bool:
        """To be called at a refusal; whether they have gone on for `REFUSED_FOR`.

        A pause of half that time begins anew: the server was away, and its first word decides nothing.
        """
        if now - self._last > REFUSED_FOR / 2:
            self._first = now
        self._last = now
        return now - self._first > REFUSED_FOR

    def clear(self) -> None:
        """The server took the login."""
        self._first = self._last = -math.inf


class Bus:
    """One connection.

    Attributes:
        subjects: The subjects under the configured prefix.
        closed: Set when the connection is gone for good, by `close` or by a fault.
        refused: Set when the login has been refused for `REFUSED_FOR`.
        failure: Why, where it was a fault.
        callback_errors: Exceptions from callbacks, all logged.
        errors: Errors that nats-py reported, all logged.
        watchdog: Checks that the connection is alive.
    """

    def __init__(self, settings: BusSettings, inbox_prefix: str, *, keeps_trying: bool) -> None:
        """Not to be called; see `connect`."""
        self.subjects: Subjects = settings.subjects
        self._keeps_trying = keeps_trying
        self.closed = asyncio.Event()
        self.refused = asyncio.Event()
        self.failure: str | None = None
        self.callback_errors = 0
        self.errors = 0
        self._permissions = Permissions()
        self._inboxes = Inboxes(inbox_prefix)
        # Apart: who knows an inbox can have the server send something there.
        self._secret_inboxes = Inboxes(inbox_prefix)
        self._requests = Requests(self._secret_inboxes)
        self._listeners: list[Callable[[bool], None]] = []
        self._connected = asyncio.Event()
        self._decided = asyncio.Event()
        self._refusals = Refusals()
        self._since = 0.0
        self._logged_errors: set[str] = set()
        self._closing = False
        self._supervision: asyncio.Task[None] | None = None
        self._ending: asyncio.Future[None] | None = None
        self._client: natspy.GuardedClient
        self._writer: Writer
        self._subscriptions: Subscriptions
        self.watchdog: Watchdog

    @classmethod
    async def connect(
        cls,
        settings: BusSettings,
        *,
        name: str,
        inbox_prefix: str | None = None,
        watchdog: float = INTERVAL,
        keeps_trying: bool = False,
    ) -> Bus:
        """Connects.

        Args:
            settings: Where to, and as whom.
            name: Shown in the server's list of connections.
            inbox_prefix: In place of the settings'.
            watchdog: Seconds between its questions.
            keeps_trying: A login that stays refused sets `refused` only, and does not close the connection.

        Raises:
            BusUnavailable: Nothing answers, or it refuses, or is too old; one line says which.
        """
        bus = cls(settings, inbox_prefix or settings.inbox_prefix, keeps_trying=keeps_trying)
        events: Events = {
            "error_cb": bus._on_error,
            "disconnected_cb": bus._on_disconnected,
            "reconnected_cb": bus._on_reconnected,
            "closed_cb": bus._on_closed,
        }
        bus._client = await dial(settings, name=name, events=events)
        bus._writer = Writer(bus._client)
        bus._writer.start()
        bus._subscriptions = Subscriptions(
            bus._client,
            connected=bus._connected.is_set,
            flush=bus.flush,
            failed=bus._callback_failed,
        )
        bus._set_connected(True)
        bus.watchdog = Watchdog(bus._client, bus._fail, interval=watchdog)
        bus._supervision = asyncio.create_task(bus.watchdog.run(), name="bus-watchdog")
        try:
            for inboxes in (bus._inboxes, bus._secret_inboxes):
                await bus.subscribe(inboxes.filter, inboxes.dispatch, undecodable=True)
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
        """Whether an error is the server's, rather than due to a connection that was lost or is new.

        A request sent just before the connection was lost is never answered, and a server that has just
        started may have no JetStream yet.
        """
        return self.connected and (self.reconnects == 0 or time.monotonic() - self._since > SETTLING)

    @property
    def max_payload(self) -> int:
        """Largest message in bytes, headers included."""
        return self._writer.max_payload

    @property
    def undecodable(self) -> int:
        """Messages that were dropped because their subject or headers are no text."""
        return self._subscriptions.undecodable

    @property
    def writer(self) -> Writer:
        """For its counters."""
        return self._writer

    @property
    def reconnects(self) -> int:
        """How often the connection was made again."""
        return int(self._client.stats["reconnects"])

    def may_publish(self, subject: str) -> bool:
        """Whether the server has refused no publish to a subject, or, with wildcards, to any that it matches.

        NATS reports a refusal on the connection, some time after the publish. Case is ignored, as nats-py
        gives the server's text in lower case.
        """
        return self._permissions.may_publish(subject)

    def on_change(self, listener: Callable[[bool], None]) -> Callable[[], None]:
        """Calls `listener` with True or False when the server comes or goes; returns what ends that."""
        self._listeners.append(listener)

        def forget() -> None:
            with contextlib.suppress(ValueError):
                self._listeners.remove(listener)

        return forget

    async def until_connected(self) -> None:
        """Returns when the server is there.

        Raises:
            BusUnavailable: The connection is closed for good.
        """
        await self._decided.wait()
        if not self.connected:
            raise BusUnavailable(f"the connection to NATS is closed: {self.failure or 'by this process'}")

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
                await self.until_connected()
                await self._writer.written()
                await self._client.flush(timeout=max(1, round(timeout)))
        except (TimeoutError, nats.errors.Error, OSError) as error:
            raise BusUnavailable(f"NATS did not take everything within {timeout:g} s") from error

    async def subscribe(
        self, subject: str, callback: Callback, queue: str = "", *, undecodable: bool = False
    ) -> Subscription:
        """Subscribes; on return the server knows. Messages of one subscription come one after the other.

        Args:
            subject: To this.
            callback: Gets the messages.
            queue: In this queue group, if any.
            undecodable: Also those whose subject or headers are no text; else they are logged and dropped.

        Raises:
            NotPermitted: Naming the subject.
            InvalidSubject: Not a subject that can be subscribed to.
        """
        # Apart from the caller's task: nats-py would swallow its cancellation, and the subscription stay.
        opening = asyncio.ensure_future(self._subscribe(subject, callback, queue, undecodable))
        try:
            return await asyncio.shield(opening)
        except asyncio.CancelledError:
            opening.add_done_callback(_abandon)
            raise

    async def _subscribe(
        self, subject: str, callback: Callback, queue: str, undecodable: bool
    ) -> Subscription:
        subscription = await self._subscriptions.open(
            check_filter(subject), queue, callback, undecodable=undecodable
        )
        self._permissions.allow_subscription(subject)
        try:
            if self.connected:
                await self.flush()
        except BusUnavailable:
            # A connection that was lost meanwhile comes back with all of its subscriptions.
            if self.settled or self.closed.is_set():
                subscription.forget()
                raise
        if not self._permissions.may_subscribe(subject):
            await subscription.unsubscribe()
            raise NotPermitted(f"not permitted to subscribe to {subject}")
        return subscription

    def private_subject(self, token: str | None = None) -> str:
        """A prefix of subjects that only this process uses, or those processes that share the token."""
        return f"{self._inboxes.prefix}.{token or secrets.token_hex(11)}"

    def inbox(self, callback: Callback, *, secret: bool = False) -> Inbox:
        """A new reply subject for any number of answers; close it when done.

        Args:
            callback: Gets the answers.
            secret: For questions to the server only. Its subject has a part that no client and no other
                worker ever sees, so that none can have an answer sent there.
        """
        return (self._secret_inboxes if secret else self._inboxes).open(callback)

    @property
    def open_inboxes(self) -> int:
        """Inboxes that are not closed."""
        return len(self._inboxes) + len(self._secret_inboxes)

    def probe_inbox(self, callback: Callable[[str], None]) -> Inbox:
        """A reply subject that reports messages without a subscriber.

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
        with self._requests.open(subject) as (reply, answer):
            try:
                async with asyncio.timeout(timeout):
                    # Nothing is queued while NATS is away: it would be sent after the timeout.
                    await self.until_connected()
                    self.send(subject, data, headers, reply=reply)
                    message = await answer
            except TimeoutError:
                away = "" if self.connected else ": NATS is away"
                raise BusUnavailable(f"no answer on {subject} within {timeout:g} s{away}") from None
        if message.status == NO_RESPONDERS:
            raise NoResponders(f"nobody listens on {subject}")
        return message

    async def ask(
        self,
        subject: str,
        data: bytes = b"",
        headers: Mapping[str, str] | None = None,
        timeout: float = TIMEOUT,
    ) -> AsyncGenerator[Message]:
        """Sends a message and yields every answer; ended by its caller, with `aclosing`.

        Args:
            subject: Where to.
            data: The body.
            headers: Its headers.
            timeout: Seconds to wait for each answer.

        Raises:
            NoResponders: Nobody listens.
            NotPermitted: Naming the subject.
            BusUnavailable: No answer in time.
        """
        with self._requests.open_many(subject) as (reply, answers):
            try:
                async with asyncio.timeout(timeout):
                    await self.until_connected()
                self.send(subject, data, headers, reply=reply)
                while True:
                    async with asyncio.timeout(timeout):
                        message = await answers.get()
                    if isinstance(message, NotPermitted):
                        raise message
                    if message.status == NO_RESPONDERS:
                        raise NoResponders(f"nobody listens on {subject}")
                    yield message
            except TimeoutError:
                raise BusUnavailable(f"{subject} was not answered in time") from None

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
        self._decided.set()

    async def _close_client(self, timeout: float) -> None:
        try:
            async with asyncio.timeout(timeout):
                await self._client.close()
        except (TimeoutError, nats.errors.Error, OSError, RuntimeError) as error:
            # RuntimeError: uvloop closed the transport while nats-py was closing the connection.
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
        self._decided.set()
        if not self._client.is_closed:
            await self._close_client(2.0)

    def _set_connected(self, connected: bool) -> None:
        if connected == self._connected.is_set():
            return
        if connected:
            self._since = time.monotonic()
            self._connected.set()
            self._decided.set()
        else:
            self._connected.clear()
            self._decided.clear()
        self._writer.set_connected(connected)
        for listener in list(self._listeners):
            try:
                listener(connected)
            except Exception:  # supervision point: callbacks given to nats-py
                self._callback_failed()
                defects.exception("bus.callback_failed", subject="connection")

    def _callback_failed(self) -> None:
        self.callback_errors += 1

    async def _on_error(self, error: Exception) -> None:
        # Must not raise: nats-py awaits this in its read loop, which an exception would end.
        self.errors += 1
        refusal = parse_refusal(str(error))
        if refusal is None:
            text = str(error) or type(error).__name__
            # While NATS is away every try to reconnect fails; each reason is logged once.
            new = self.connected or text not in self._logged_errors
            self._logged_errors.add(text)
            (log.warning if new else log.debug)("bus.error", error=text, kind=type(error).__name__)
            if natspy.refuses_login(text) and self._refusals.too_long(time.monotonic()):
                self._stays_refused(f"the login stays refused: {text}")
            return
        if self._permissions.add(refusal):
            log.error("bus.not_permitted", action=refusal.action, subject=refusal.subject)
        if refusal.action == "publish":
            self._requests.refuse(refusal.subject)

    def _stays_refused(self, reason: str) -> None:
        if self.refused.is_set():
            return
        self.refused.set()
        if self._keeps_trying:
            log.error("bus.refused", reason=reason)
        else:
            # Not here: this is nats-py's own task, which closing would wait for.
            self._ending = asyncio.ensure_future(self._fail(reason))

    async def _on_disconnected(self) -> None:
        if not self._closing:
            log.warning("bus.disconnected", error=str(self._client.last_error or ""))
        self._set_connected(False)
        self._subscriptions.disconnected()

    async def _on_reconnected(self) -> None:
        self._permissions.clear()
        self._refusals.clear()
        self._logged_errors.clear()
        log.info("bus.reconnected", times=self.reconnects)
        self._set_connected(True)

    async def _on_closed(self) -> None:
        await self._fail(str(self._client.last_error or "the client closed the connection"))


def _abandon(opening: asyncio.Future[Subscription]) -> None:
    if not opening.cancelled() and opening.exception() is None:
        opening.result().abandon()
