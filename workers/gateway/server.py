"""Runs the gateway: its connection to NATS, its HTTP server, and their end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Callable, Iterator
from typing import Final

import structlog
import uvicorn

from inferbus.schemas.errors import InferbusError
from inferbus.workers.client import Client
from inferbus.workers.client.keys import KeyBucket
from inferbus.workers.config import GatewaySettings, Settings
from inferbus.workers.gateway.app import Gateway
from inferbus.workers.gateway.keys import ANYBODY, Keys

log = structlog.get_logger()

REFRESH_EVERY: Final = 2.0
"""Seconds between two looks at the file of keys."""

BACKLOG: Final = 2048


class Unserved(InferbusError):
    """The gateway cannot listen where its settings say."""

    code = "unserved"


async def run(settings: Settings, stop: asyncio.Event, *, listening: Callable[[str], None]) -> None:
    """Serves until `stop` is set, then lets open requests finish.

    Args:
        settings: Of the gateway and of its connection.
        stop: Set from outside.
        listening: Called with the URL once requests are answered.

    Raises:
        ConfigError: The keys cannot be used.
        Unserved: It cannot listen there.
        BusUnavailable: NATS does not answer, or the connection ended for good.
    """
    keys = Keys(settings.gateway)
    with listener(settings.gateway) as listening_on:
        async with Client.connect(settings.bus, owner=ANYBODY, name="inferbus gateway") as client:
            gateway = Gateway(client, settings.gateway, keys)
            server = _Server(
                uvicorn.Config(
                    gateway.app,
                    lifespan="off",
                    ws="none",
                    log_config=None,
                    access_log=False,
                    server_header=False,
                    timeout_graceful_shutdown=round(settings.gateway.grace),
                )
            )
            serving = asyncio.create_task(server.serve(sockets=[listening_on]))
            work = [asyncio.create_task(_refresh(keys)), asyncio.create_task(gateway.runner.look())]
            if settings.gateway.stored_keys:
                work.append(asyncio.create_task(KeyBucket(client.bus).watch(keys.store)))
            ending = [asyncio.create_task(event.wait()) for event in (stop, client.bus.closed)]
            try:
                url = _url(listening_on)
                log.info("gateway.listening", url=url, keys=keys.required)
                listening(url)
                await asyncio.wait([serving, *ending], return_when=asyncio.FIRST_COMPLETED)
                gateway.draining = server.should_exit = True
                await serving
            finally:
                for task in (serving, *work, *ending):
                    task.cancel()
                await asyncio.gather(serving, *work, *ending, return_exceptions=True)
            if client.bus.failure is not None:
                raise Unserved(f"the connection to NATS is closed: {client.bus.failure}")


class _Server(uvicorn.Server):
    """uvicorn's server, which leaves signals to its caller."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def _refresh(keys: Keys) -> None:
    while True:
        await asyncio.sleep(REFRESH_EVERY)
        await asyncio.to_thread(keys.refresh)


@contextlib.contextmanager
def listener(settings: GatewaySettings) -> Iterator[socket.socket]:
    """The socket that it listens on.

    Raises:
        Unserved: It cannot listen there.
    """
    host, port = settings.address
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, _, _, _, address = found[0]
        # asyncio turns Nagle's algorithm off only where the protocol is named. With it, the first event of
        # an answer waits 40 ms for the reader to acknowledge the headers.
        made = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        try:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            made.bind(address)
            made.listen(BACKLOG)
        except OSError:
            made.close()
            raise
    except OSError as error:
        raise Unserved(f"--gateway-listen: cannot listen on {settings.listen}: {error.strerror}") from None
    with made:
        yield made


def _url(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class _Forward(logging.Handler):
    """What uvicorn logs, among our own events."""

    def emit(self, record: logging.LogRecord) -> None:
        log.debug("gateway.http", level=record.levelname, message=record.getMessage())


def quiet() -> None:
    """Puts uvicorn's log among ours: a caller that leaves is no error of the server's."""
    logger = logging.getLogger("uvicorn")
    logger.handlers, logger.propagate = [_Forward()], False
