"""Every use of nats-py's private attributes, each with a fallback for a version without them.

nats-py 2.16 has no public way to write several messages in one step, to tell a
dead read loop from an idle one, or to drop a socket whose peer is frozen.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import ssl
from collections.abc import Awaitable, Callable
from typing import Any, Final

from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription
from nats.aio.transport import TcpTransport
from nats.errors import ConnectionClosedError, Error, StaleConnectionError

from inferbus.schemas.headers import escaped
from inferbus.workers.bus.connection.login import Login
from inferbus.workers.bus.connection.message import Callback
from inferbus.workers.bus.connection.protocol import Headers, Parser, read_headers, read_subject

_REFUSES_LOGIN: Final = re.compile(
    r"authoriz|authentic|credentials|expired|revoked|certificate|TLS files|NKey", re.IGNORECASE
)


BUFFER: Final = 512 * 1024
"""Bytes that are read at a time: where much comes, each reader is woken once for many messages."""


class DirectSubscription(Subscription):  # type: ignore[misc]  # nats-py has no types
    """nats-py's subscription, without its queue and its task: the parser calls the callback.

    Attributes:
        deliver: Gets the messages; never raises.
    """

    def __init__(self, client: Client, number: int, subject: str, queue: str, deliver: Callback) -> None:
        super().__init__(client, number, subject, queue)
        self.deliver = deliver


class GuardedClient(Client):  # type: ignore[misc]  # nats-py has no types
    """nats-py's client, with a read loop that survives a late PONG, and without leaked sockets.

    `flush` and `rtt` cancel their future when they time out or are cancelled, and leave it in the list of
    expected PONGs. When that PONG comes after all, `set_result` raises InvalidStateError, which ends the
    read loop unreported: the client stays "connected" and receives nothing. Where a later version renames
    these methods, the watchdog notices.

    What arrives is read by our own parser; see `protocol`.
    """

    def __init__(self, login: Login) -> None:
        super().__init__()
        self._ps = Parser(self)
        self._login = login

    @property
    def ssl_context(self) -> ssl.SSLContext:
        """For a new connection."""
        return self._login.context()

    def _connect_command(self) -> bytes:
        # nats-py sends a URL's password as it stands there, and reads NKeys once.
        command, _, options = super()._connect_command().partition(b" ")
        nonce, server = self._server_info.get("nonce") or "", self._current_server
        login = self._login.fields(nonce, server.uri if server is not None else None)
        return b"%b %b\r\n" % (command, json.dumps(json.loads(options) | login).encode())

    async def _process_err(self, err_msg: str) -> None:
        # nats-py closes for good when a login has expired or was withdrawn. The files may be new by now.
        if refuses_login(err_msg) and self.is_connected:
            error = Error(f"nats: {err_msg}")
            await self._error_cb(error)
            await self._process_op_err(error)
            return
        await super()._process_err(err_msg)

    async def _process_connect_init(self) -> None:
        try:
            await super()._process_connect_init()
        except (OSError, Error, TimeoutError):
            raise
        except Exception as error:  # supervision point: nats-py would stop reconnecting, and not tell
            raise Error(f"no NATS server: {type(error).__name__}") from error

    async def listen(self, subject: str, queue: str, deliver: Callback) -> DirectSubscription:
        """Subscribes; messages are given to `deliver` in the step that reads them.

        Raises:
            nats.errors.Error: The connection is closed.
        """
        if self.is_closed:
            raise ConnectionClosedError
        self._sid += 1
        self._subs[self._sid] = sub = DirectSubscription(self, self._sid, subject, queue, deliver)
        await self._send_subscribe(sub)
        return sub

    def direct(self, number: int) -> Callback | None:
        """Who gets the messages of a subscription; None where nats-py does, or it has ended."""
        sub = self._subs.get(number)
        return sub.deliver if type(sub) is DirectSubscription else None

    async def _process_headers(self, headers: bytes | None) -> Headers | None:
        return read_headers(headers) if headers else None

    def _build_message(
        self, sid: int, subject: bytes, reply: bytes, data: bytes, headers: Headers | None
    ) -> Msg:
        # Of nats-py's own subscriptions, whose `decode` could fail.
        target, answer = read_subject(subject), read_subject(reply)
        return Msg(
            self,
            subject=escaped(subject) if target is None else target,
            reply=escaped(reply) if answer is None else answer,
            data=data,
            headers=headers,
            _sid=sid,
        )

    async def _process_pong(self) -> None:
        pongs: list[asyncio.Future[bool]] = getattr(self, "_pongs", [])
        if pongs and pongs[0].done():
            pongs.pop(0)
            self._pings_outstanding = 0
            return
        await super()._process_pong()

    async def _flush_pending(self, force_flush: bool = False) -> Any:
        # For a closed transport uvloop raises RuntimeError, where asyncio drops the data.
        try:
            return await super()._flush_pending(force_flush)
        except RuntimeError as error:
            raise StaleConnectionError from error

    async def _close(self, status: int, do_cbs: bool = True) -> None:
        # nats-py writes what is unsent even to a lost connection's closed transport: the same RuntimeError.
        writer = _socket_writer(self)
        if writer is not None and writer.is_closing():
            self._pending: list[bytes] = []
            self._pending_data_size = 0
        await super()._close(status, do_cbs)

    async def _connect_to_server(self, s: Any) -> None:
        # An attempt that failed after its TCP connection was made would leave the socket to the garbage
        # collector; the server sent nothing, for example.
        abort_socket(self)
        if s.uri.scheme in ("nats", "tls"):
            self._transport: Any = GuardedTransport()
        await super()._connect_to_server(s)
        _drop_writes_when_closed(getattr(self, "_transport", None))


class GuardedTransport(TcpTransport):  # type: ignore[misc]  # nats-py has no types
    """nats-py's socket, without a warning of asyncio's at the end of every connection with TLS."""

    def __bool__(self) -> bool:
        # nats-py would replace one that is not connected yet.
        return True

    async def connect(self, uri: Any, buffer_size: int, connect_timeout: int) -> None:
        """See nats-py."""
        await super().connect(uri, BUFFER, connect_timeout)

    async def read(self, buffer_size: int) -> bytes:
        """See nats-py."""
        data: bytes = await super().read(BUFFER)
        return data

    async def connect_tls(self, *arguments: Any, **options: Any) -> None:
        """See nats-py."""
        await super().connect_tls(*arguments, **options)
        # asyncio's own `open_connection` tells this to the protocol; nats-py makes one itself.
        protocol = self._io_writer.transport.get_protocol()
        if hasattr(protocol, "_over_ssl"):
            protocol._over_ssl = True


def refuses_login(text: str) -> bool:
    """Whether an error of the server, or of `Login`, is about who this process is."""
    return _REFUSES_LOGIN.search(text) is not None


def _drop_writes_when_closed(transport: Any) -> None:
    """Has a closed transport drop what is written to it, as asyncio's does.

    uvloop's raises RuntimeError, in the middle of `close` for example, which then leaves the rest undone.
    """
    write = getattr(transport, "writelines", None)
    if write is None:
        return

    def writelines(payload: Any) -> None:
        with contextlib.suppress(RuntimeError):
            write(payload)

    transport.writelines = writelines


def can_write_batches(client: Any) -> bool:
    """Whether `write_batch` works with this version."""
    return hasattr(client, "_send_command") and hasattr(client, "_flush_pending")


async def write_batch(client: Any, frames: bytes) -> None:
    """Queues whole protocol frames for the socket, in one step instead of one per message.

    `Client.publish` does the same after its own checks, for which `frames` stands in. It halves the cost of a
    small message. Waits while more than `pending_size` is queued, which is the socket's back-pressure.

    Raises:
        nats.errors.Error: The connection is gone.
    """
    await client._send_command(frames)
    await client._flush_pending()


async def write_out(client: Any) -> None:
    """Waits until the client's buffer is on the socket.

    A PING overtakes that buffer, so its PONG does not confirm it. Where this cannot be done, the buffer is
    most probably empty when the PONG comes.

    Raises:
        nats.errors.Error: The connection is gone.
    """
    flush = getattr(client, "_flush_pending", None)
    if callable(flush):
        await flush(force_flush=True)


def read_loop_died(client: Any) -> bool:
    """Whether nothing reads the socket although the client reports that it is connected."""
    task = getattr(client, "_reading_task", None)
    return bool(client.is_connected and isinstance(task, asyncio.Task) and task.done())


def reconnecting_died(client: Any) -> bool:
    """Whether the client reports that it reconnects although that task has ended, by an exception."""
    task = getattr(client, "_reconnection_task", None)
    return bool(client.is_reconnecting and isinstance(task, asyncio.Task) and task.done())


def abort_socket(client: Any) -> bool:
    """Drops the socket and what is still to be sent; False where that cannot be done.

    nats-py closes a lost connection gracefully, and so waits for ever for a stopped peer that reads nothing.
    """
    writer = _socket_writer(client)
    if writer is None:
        return False
    writer.transport.abort()
    return True


def is_encrypted(client: Any) -> bool | None:
    """Whether the connection uses TLS; None where that is unknown."""
    writer = _socket_writer(client)
    if writer is None:
        return None
    return isinstance(writer.get_extra_info("ssl_object"), ssl.SSLObject)


def asks_for_login(client: Any) -> bool:
    """Whether the server last talked to wants credentials."""
    return bool(getattr(client, "_server_info", {}).get("auth_required"))


async def end_interest(client: Any, sub: Any, flush: Callable[[], Awaitable[None]]) -> bool:
    """Unsubscribes at the server; the subscription itself stays, for late messages.

    False where this version cannot: then `drain` is the next best. Its PING overtakes its UNSUB, which waits
    in nats-py's buffer.
    """
    send = getattr(client, "_send_unsubscribe", None)
    if not callable(send) or not hasattr(sub, "_id"):
        return False
    await send(sub._id)
    await flush()
    return True


def forget_subscription(client: Any, sub: Any) -> None:
    """Removes a subscription from those that nats-py makes again after a reconnection.

    An interrupted `drain` leaves it there, marked as closed, so that `unsubscribe` refuses.
    """
    stop = getattr(sub, "_stop_processing", None)
    remove = getattr(client, "_remove_sub", None)
    if callable(stop):
        stop()
    if callable(remove):
        remove(getattr(sub, "_id", -1))


def _socket_writer(client: Any) -> asyncio.StreamWriter | None:
    """Where the client writes; None over a WebSocket, before the first connection, or where unknown."""
    writer = getattr(getattr(client, "_transport", None), "_io_writer", None)
    return writer if isinstance(writer, asyncio.StreamWriter) else None
