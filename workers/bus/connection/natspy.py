"""What inferbus needs of nats-py's inside, all in one place, each with what happens where it is missing.

nats-py 2.16 has no public way to write several messages in one step, to tell a
dead read loop from an idle one, or to give up a socket whose peer is frozen.
A later nats-py may rename any of this: every function then falls back to
public API, or tells that it does not know.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Awaitable, Callable
from typing import Any

from nats.aio.client import Client
from nats.errors import StaleConnectionError


class GuardedClient(Client):  # type: ignore[misc]  # nats-py has no types
    """nats-py's client, with a read loop that outlives a late PONG, and without forgotten sockets.

    `flush` and `rtt` cancel their future when they time out or are cancelled, and leave it in the list of
    expected PONGs. When that PONG comes after all, `set_result` raises InvalidStateError, which ends the
    read loop without a word: still "connected", nothing received any more (trial B4). Where a later version
    calls this differently, the watchdog still notices.
    """

    async def _process_pong(self) -> None:
        pongs: list[asyncio.Future[bool]] = getattr(self, "_pongs", [])
        if pongs and pongs[0].done():
            pongs.pop(0)
            self._pings_outstanding = 0
            return
        await super()._process_pong()

    async def _flush_pending(self, force_flush: bool = False) -> Any:
        # Until nats-py notices, uvloop raises RuntimeError for a closed transport, where asyncio drops data.
        try:
            return await super()._flush_pending(force_flush)
        except RuntimeError as error:
            raise StaleConnectionError from error

    async def _connect_to_server(self, s: Any) -> None:
        # A try that failed after its connection was made, by a server that says nothing for example, would
        # leave its socket to the garbage collector.
        abort_socket(self)
        await super()._connect_to_server(s)


def can_write_batches(client: Any) -> bool:
    """Whether `write_batch` works with this version."""
    return hasattr(client, "_send_command") and hasattr(client, "_flush_pending")


async def write_batch(client: Any, frames: bytes) -> None:
    """Queues whole protocol frames for the socket, in one step instead of one per message.

    This is what `Client.publish` does after its checks, which `frames` makes better. It halves the cost of a
    small message. Waits while more than `pending_size` is queued, which is the socket's back-pressure.

    Raises:
        nats.errors.Error: The connection is gone.
    """
    await client._send_command(frames)
    await client._flush_pending()


async def write_out(client: Any) -> None:
    """Waits until the client's buffer is on the socket.

    A PING overtakes what is in that buffer, so that its PONG says nothing about it. Where this is not
    possible, the buffer is most probably empty when the PONG comes.

    Raises:
        nats.errors.Error: The connection is gone.
    """
    flush = getattr(client, "_flush_pending", None)
    if callable(flush):
        await flush(force_flush=True)


def read_loop_died(client: Any) -> bool:
    """Whether nothing reads the socket although the client says that it is connected (facts 4.2)."""
    task = getattr(client, "_reading_task", None)
    return bool(client.is_connected and isinstance(task, asyncio.Task) and task.done())


def reconnecting_died(client: Any) -> bool:
    """Whether the client says that it reconnects although that task has ended, by an unexpected exception."""
    task = getattr(client, "_reconnection_task", None)
    return bool(client.is_reconnecting and isinstance(task, asyncio.Task) and task.done())


def abort_socket(client: Any) -> bool:
    """Drops the socket without waiting for what is still to be sent; False where that cannot be done.

    nats-py closes a lost connection in good order, and so waits for ever on a peer that is stopped and takes
    no more bytes.
    """
    writer = getattr(getattr(client, "_transport", None), "_io_writer", None)
    transport = getattr(writer, "transport", None)
    if not isinstance(transport, asyncio.Transport):
        return False
    transport.abort()
    return True


def is_encrypted(client: Any) -> bool | None:
    """Whether the connection uses TLS; None where that cannot be told."""
    writer = getattr(getattr(client, "_transport", None), "_io_writer", None)
    if not isinstance(writer, asyncio.StreamWriter):
        return None
    return isinstance(writer.get_extra_info("ssl_object"), ssl.SSLObject)


def asks_for_login(client: Any) -> bool:
    """Whether the server last talked to wants credentials."""
    return bool(getattr(client, "_server_info", {}).get("auth_required"))


async def end_interest(client: Any, sub: Any, flush: Callable[[], Awaitable[None]]) -> bool:
    """Unsubscribes at the server; the subscription itself stays, for what is late.

    False where this version cannot: then `drain` is the next best. That does not flush as it should: its PING
    overtakes its UNSUB, which waits in nats-py's buffer.
    """
    send, queue = getattr(client, "_send_unsubscribe", None), getattr(sub, "_pending_queue", None)
    if not callable(send) or not isinstance(queue, asyncio.Queue) or not hasattr(sub, "_id"):
        return False
    await send(sub._id)
    await flush()
    await queue.join()
    return True


def forget_subscription(client: Any, sub: Any) -> None:
    """Takes a subscription off the list of those made anew after a reconnect.

    A `drain` that is interrupted leaves it there, marked as closed, so that `unsubscribe` refuses.
    """
    stop = getattr(sub, "_stop_processing", None)
    remove = getattr(client, "_remove_sub", None)
    if callable(stop):
        stop()
    if callable(remove):
        remove(getattr(sub, "_id", -1))
