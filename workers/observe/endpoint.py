"""A worker's HTTP port: `/livez`, `/readyz`, and metrics on every other path.

It is opened before the engine loads, so that a supervisor can tell a worker that loads from one that is
gone, and a port that is taken is reported at once. Its threads are its own: a probe is answered while the
event loop is busy, and says so when it stands still.
"""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from socketserver import ThreadingMixIn
from typing import TYPE_CHECKING, Any, Final
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

import structlog

from inferbus.schemas.errors import WorkerError
from inferbus.workers.config import WorkerSettings
from inferbus.workers.observe.health import Health

if TYPE_CHECKING:
    from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

log = structlog.get_logger()

PATIENCE: Final = 10.0
"""Seconds that a caller may take to send its request."""


class Unserved(WorkerError):
    """The HTTP port cannot be served as the settings say; the message names the setting."""


class Endpoint:
    """What the port answers.

    Args:
        health: Of the worker.

    Attributes:
        metrics: Answers every path but the probes' own; None while there are no metrics yet.
    """

    def __init__(self, health: Health) -> None:
        self._probes: dict[str, Callable[[], str | None]] = {
            "/livez": health.dead,
            "/readyz": health.unready,
        }
        self._health = health
        self.metrics: WSGIApplication | None = None

    def __call__(self, environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        """Answers one request."""
        probe = self._probes.get(environ["PATH_INFO"])
        if probe is None and self.metrics is not None:
            return self.metrics(environ, start_response)
        problem = (probe or self._health.unready)()
        status = "200 OK" if problem is None else "503 Service Unavailable"
        body = f"{problem or 'ok'}\n".encode()
        start_response(
            status, [("Content-Type", "text/plain; charset=utf-8"), ("Content-Length", str(len(body)))]
        )
        return [body]


@asynccontextmanager
async def serving(settings: WorkerSettings, health: Health) -> AsyncIterator[Endpoint | None]:
    """Serves a worker's port over HTTP while the block runs; None where the settings ask for none.

    Args:
        settings: Host and port.
        health: Of the worker.

    Raises:
        Unserved: The port is taken, or the host is not one of this machine's.
    """
    if settings.metrics_port is None:
        yield None
        return
    endpoint = Endpoint(health)
    try:
        server = _listen(settings.metrics_host, settings.metrics_port)
    except OSError as error:
        where = f"{settings.metrics_host}:{settings.metrics_port}"
        reason = error.strerror or error
        raise Unserved(f"--metrics-port: cannot listen on {where}: {reason}") from error
    server.set_app(endpoint)
    thread = threading.Thread(target=server.serve_forever, name="http", daemon=True)
    thread.start()
    log.info("metrics.serving", host=settings.metrics_host, port=server.server_port)
    try:
        yield endpoint
    finally:
        # It looks only twice a second whether it shall end.
        await asyncio.to_thread(server.shutdown)
        server.server_close()
        thread.join()


class _Handler(WSGIRequestHandler):
    timeout = PATIENCE

    def log_message(self, format: str, *args: Any) -> None:
        """Not a line for every probe."""


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A caller that went away is no event."""
        log.debug("metrics.request_failed", exc_info=True)


def _listen(host: str, port: int) -> _Server:
    family, _, _, _, address = socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]

    class Server(_Server):
        address_family = family

    return Server((str(address[0]), port), _Handler)
