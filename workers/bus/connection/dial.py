"""Opening a connection: nats-py's options from ours, and one line that says why it failed."""

from __future__ import annotations

import asyncio
import random
import ssl
from collections.abc import Callable, Coroutine
from typing import Any, Final

import nats.errors
from nats.aio.client import Server

from inferbus.schemas.errors import BusUnavailable
from inferbus.workers.bus.connection import natspy
from inferbus.workers.bus.connection.login import Login, LoginError
from inferbus.workers.config import BusSettings, hide_userinfo

RECONNECT_FIRST: Final = 0.1
RECONNECT_LAST: Final = 2.0
"""Seconds between tries, before jitter: short, so that work goes on soon after a restart of the server."""

PENDING: Final = 2 * 1024 * 1024
"""Bytes in nats-py's own buffer at which the writer waits."""

MINIMUM_VERSION: Final = (2, 12)

Events = dict[str, Callable[..., Coroutine[Any, Any, None]]]


async def dial(settings: BusSettings, *, name: str, events: Events) -> natspy.GuardedClient:
    """A connected client that reconnects for ever.

    Args:
        settings: Where to, and as whom.
        name: Shown in the server's list of connections.
        events: nats-py's callbacks by name (`error_cb`, `closed_cb`, …).

    Raises:
        BusUnavailable: Nothing answers, or it refuses; every server was tried once.
    """
    login = Login(settings)
    try:
        login.check()
    except LoginError as error:
        raise BusUnavailable(_text(error)) from error
    client = natspy.GuardedClient(login)
    failures: list[Exception] = []
    tried = asyncio.Event()
    connected = False

    def once_connected(name: str) -> Callable[..., Coroutine[Any, Any, None]]:
        async def event(*arguments: Any) -> None:
            if connected:
                await events[name](*arguments)
            elif name == "error_cb":
                failures.extend(arguments)
                if len(failures) >= len(settings.urls):
                    tried.set()

        return event

    # nats-py retries for ever, which is wanted for reconnections only.
    connecting = asyncio.create_task(
        client.connect(**_options(settings, name), **{name: once_connected(name) for name in events})
    )
    trying = asyncio.create_task(tried.wait())
    limit = settings.connect_timeout * len(settings.urls) + 1
    try:
        await asyncio.wait({connecting, trying}, timeout=limit, return_when=asyncio.FIRST_COMPLETED)
        if not connecting.done():
            failure: BaseException = failures[-1] if failures else TimeoutError()
        elif (raised := connecting.exception()) is not None:
            failure = raised
        elif not client.is_connected:
            # nats-py takes the end of the connection for the answer to its CONNECT.
            failure = ConnectionResetError("the server closed the connection")
        else:
            await _check(client, settings, login)
            connected = True
            return client
    except asyncio.CancelledError:
        await _give_up(client, connecting)
        raise
    finally:
        trying.cancel()
    await _give_up(client, connecting)
    if isinstance(failure, ConnectionError) and natspy.asks_for_login(client):
        # The server says why before it closes, but a reset may overtake that.
        failure = nats.errors.AuthorizationError()
    raise _explained(failure, settings) from failure


async def _check(client: natspy.GuardedClient, settings: BusSettings, login: Login) -> None:
    """Checks the server's version and the connection's encryption; closes where they are wrong."""
    server = client.connected_server_version
    version = (server.major, server.minor)
    if version < MINIMUM_VERSION:
        await client.close()
        need = ".".join(map(str, MINIMUM_VERSION))
        raise BusUnavailable(
            f"the NATS server is version {version[0]}.{version[1]}; inferbus needs {need} or later"
        )
    if login.wants_tls and natspy.is_encrypted(client) is False:
        # nats-py uses plain text where the server does not require TLS.
        await client.close()
        raise BusUnavailable(f"TLS is asked for, but {_where(settings)} does not offer it")


async def _give_up(client: natspy.GuardedClient, connecting: asyncio.Task[None]) -> None:
    for _ in range(20):
        if connecting.done():
            break
        # More than once: nats-py catches CancelledError while it connects and writes, and may go on.
        connecting.cancel()
        await asyncio.wait({connecting}, timeout=0.1)
    # Errors of a connection that was never made are ignored.
    closing = asyncio.create_task(client.close())
    await asyncio.wait({closing}, timeout=1)
    for task in (connecting, closing):
        if not task.done():
            task.cancel()
        elif not task.cancelled():
            task.exception()


def _options(settings: BusSettings, name: str) -> dict[str, Any]:
    return {
        "servers": list(settings.urls),
        "name": name,
        "tls_handshake_first": settings.tls_first,
        "inbox_prefix": settings.inbox_prefix,
        "connect_timeout": settings.connect_timeout,
        "max_reconnect_attempts": -1,
        "reconnect_to_server_handler": _next_server,
        "pending_size": PENDING,
        "flush_timeout": 10,
        "ping_interval": 20,
        "max_outstanding_pings": 2,
    }


def _next_server(servers: list[Server], _info: dict[str, Any]) -> tuple[Server | None, float]:
    """The server tried least often, after a pause that grows, with jitter."""
    if not servers:
        return None, RECONNECT_LAST
    server = min(servers, key=lambda each: each.reconnects)
    pause = min(RECONNECT_FIRST * 2.0 ** min(server.reconnects, 10), RECONNECT_LAST)
    return server, pause * random.uniform(0.5, 1.0)  # noqa: S311  # jitter


def _explained(failure: BaseException, settings: BusSettings) -> BusUnavailable:
    where = _where(settings)
    text = _text(failure)
    if isinstance(failure, ssl.SSLError):
        return BusUnavailable(f"TLS with {where} failed: {text}")
    if isinstance(failure, nats.errors.AuthorizationError) or "uthorization" in text or "uthenticat" in text:
        return BusUnavailable(f"{where} refuses these credentials: {text}")
    if isinstance(failure, TimeoutError):
        hint = "" if settings.tls_first else " (one with handshake_first needs --nats-tls-first)"
        return BusUnavailable(f"{where} did not answer within {settings.connect_timeout:g} s{hint}")
    if isinstance(failure, OSError):
        return BusUnavailable(f"no NATS server at {where}: {text}")
    return BusUnavailable(f"cannot connect to {where}: {text}")


def _where(settings: BusSettings) -> str:
    return ", ".join(hide_userinfo(url) for url in settings.urls)


def _text(error: BaseException) -> str:
    """One line about an error that may have an empty text."""
    text = " ".join(str(error).split()).removeprefix("nats: ").strip("'")
    return text or type(error).__name__
