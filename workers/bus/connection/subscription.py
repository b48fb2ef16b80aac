"""Subscriptions that lose no message when they end, and that a reconnection does not bring back."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable
from typing import Any, Final

import nats.errors
import structlog

from inferbus.schemas.errors import BusUnavailable
from inferbus.workers.bus.connection import natspy
from inferbus.workers.bus.connection.message import Callback, Message
from inferbus.workers.observe import defects

log = structlog.get_logger()

LINGER: Final = 1.0
"""Seconds for which an ended subscription still takes messages. A server thread that had found the listener
before the UNSUB may send a message after the PONG behind it."""

TIMEOUT: Final = 5.0
"""Seconds that the server may take to confirm an UNSUB."""

TOLD_EVERY: Final = 10.0
"""Seconds between two log events about messages that are no text."""

SHOWN: Final = 200
"""Characters of such a message's subject in the log."""


class Subscription:
    """Interest in a subject.

    Attributes:
        subject: What was subscribed to.
        queue: The queue group, or empty.
    """

    def __init__(self, subscriptions: Subscriptions, sub: Any, subject: str, queue: str) -> None:
        """Not to be called; see `Bus.subscribe`."""
        self._subscriptions = subscriptions
        self._sub = sub
        self.subject = subject
        self.queue = queue

    async def unsubscribe(self) -> None:
        """Ends the subscription.

        What the server had sent by then reaches the callback before this returns, and what comes late, within
        the next second, as well.
        """
        sub, self._sub = self._sub, None
        if sub is not None:
            await self._subscriptions.end(sub)

    def abandon(self) -> None:
        """Unsubscribes without waiting; later messages are dropped."""
        sub, self._sub = self._sub, None
        if sub is not None:
            self._subscriptions.abandon(sub)

    def forget(self) -> None:
        """Ends it on this side only; a reconnection does not make it again."""
        sub, self._sub = self._sub, None
        if sub is not None:
            self._subscriptions.forget(sub)


class Subscriptions:
    """Makes and ends the subscriptions of one connection.

    Args:
        client: nats-py's.
        connected: Whether the server is there at the moment.
        flush: Returns when the server has everything.
        failed: Called when a callback raised.

    Attributes:
        undecodable: Messages that were dropped because their subject or headers are no text.
    """

    def __init__(
        self,
        client: natspy.GuardedClient,
        *,
        connected: Callable[[], bool],
        flush: Callable[[], Awaitable[None]],
        failed: Callable[[], None],
    ) -> None:
        self._client = client
        self._connected = connected
        self._flush = flush
        self._failed = failed
        self._lingering: dict[Any, asyncio.TimerHandle] = {}
        self._abandoned: set[asyncio.Task[None]] = set()
        self._told = -math.inf
        self.undecodable = 0

    async def open(
        self, subject: str, queue: str, callback: Callback, *, undecodable: bool = False
    ) -> Subscription:
        """Subscribes; the server may not know yet.

        Args:
            subject: To this.
            queue: In this queue group, if any.
            callback: Gets the messages.
            undecodable: Also those whose subject or headers are no text; else they are logged and dropped.

        Raises:
            BusUnavailable: nats-py refuses.
        """

        def deliver(message: Message) -> None:
            if message.undecodable is not None and not undecodable:
                self._refused(message.subject)
                return
            try:
                callback(message)
            except Exception:  # supervision point: the connection's read loop calls this
                self._failed()
                defects.exception("bus.callback_failed", subject=subject)

        try:
            sub = await self._client.listen(subject, queue, deliver)
        except nats.errors.Error as error:
            raise BusUnavailable(f"cannot subscribe to {subject}: {error}") from error
        return Subscription(self, sub, subject, queue)

    def _refused(self, subject: str) -> None:
        self.undecodable += 1
        # Anybody can send any number of them.
        if (now := time.monotonic()) - self._told >= TOLD_EVERY:
            self._told = now
            log.warning("bus.undecodable", subject=subject[:SHOWN], count=self.undecodable)

    def abandon(self, sub: Any) -> None:
        """Unsubscribes in the background."""
        task = asyncio.ensure_future(self.end(sub))
        self._abandoned.add(task)
        task.add_done_callback(self._abandoned.discard)

    async def end(self, sub: Any) -> None:
        """Unsubscribes while connected, then waits a while; else forgets it, so that it is not made again."""
        lingers, before = False, self._client.stats["reconnects"]
        try:
            if self._connected():
                async with asyncio.timeout(TIMEOUT):
                    lingers = await natspy.end_interest(self._client, sub, self._flush)
                    if not lingers:
                        await sub.drain()
                    elif self._client.stats["reconnects"] != before:
                        # The reconnection made it again, and nobody would end it.
                        lingers = False
                        await sub.unsubscribe()
            else:
                await sub.unsubscribe()
        except (BusUnavailable, TimeoutError, nats.errors.Error, OSError) as error:
            log.debug("bus.unsubscribe_failed", subject=sub.subject, error=str(error))
        finally:
            if lingers and self._connected():
                timer = asyncio.get_running_loop().call_later(LINGER, self.forget, sub)
                self._lingering[sub] = timer
            else:
                self.forget(sub)

    def forget(self, sub: Any) -> None:
        """Drops a subscription of nats-py's."""
        if (timer := self._lingering.pop(sub, None)) is not None:
            timer.cancel()
        natspy.forget_subscription(self._client, sub)

    def disconnected(self) -> None:
        """To be called when the connection is lost: a reconnection would make lingering ones again."""
        for sub in list(self._lingering):
            self.forget(sub)
