"""A whole system on this machine: NATS server, prefill worker and decode worker, each a process of its own.

    async with LocalStack(folder, model="llama") as stack:
        async with Client.connect(stack.url) as client:
            ...

Everything listens on 127.0.0.1, and nothing is left when the block ends. Logs and streams are in one
directory; a temporary one goes with the stack, unless the stack failed: its logs say why.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import secrets
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack
from pathlib import Path
from types import TracebackType
from typing import Final

import structlog

from inferbus.schemas.errors import BusUnavailable
from inferbus.schemas.fleet import Role, WorkerInfo
from inferbus.workers.client import Client
from inferbus.workers.config import ENVIRONMENT
from inferbus.workers.stack.errors import ProcessExited, StackError, WorkerFailed
from inferbus.workers.stack.processes import Child, Children, spawn
from inferbus.workers.stack.server import HOST, NatsServer

log = structlog.get_logger()

READY_TIMEOUT: Final = 900.0
"""Loading a large model from a slow disk takes minutes; a worker that cannot start ends by itself."""

PROGRAM: Final = (sys.executable, "-m", "inferbus.workers.cli")
LOOK_EVERY: Final = 0.25
GRACE: Final = 30.0
STOP_MARGIN: Final = 15.0
"""Seconds that a worker may take beside finishing its requests: to stop its engine, on a busy machine."""

GATEWAY_TIMEOUT: Final = 60.0

PORTS: Final = range(20_000, 30_000)

Report = Callable[[str], None]
"""Takes one line of text about a finished step."""


class LocalStack:
    """A NATS server and workers, from entering the context to leaving it.

    Args:
        model_path: The model's folder, or its name on a model hub.
        model: Name to serve it under.
        roles: The workers to start, one process each.
        flags: SGLang's flags for every worker.
        role_flags: SGLang's flags for one role, after `flags`.
        own_flags: SGLang's flags for each of `roles`, in their order, after those.
        env: Variables for the workers; None takes one away.
        metrics_port: Port for the metrics of the first worker; each further one takes the next. 0: free ones;
            None: no metrics.
        scripted: A script to replay instead of running SGLang; `model_path` is not used then.
        gateway: Address and port of an HTTP gateway, port 0: a free one; None: no gateway.
        gateway_env: Variables for the gateway; None takes one away.
        directory: For logs and streams; temporary by default.
        port: NATS port; 0 takes a free one.
        ready_timeout: Seconds for the workers to load.
        grace: Seconds for running requests when the stack ends.
        report: Called with a line for each part that is ready.

    Attributes:
        server: The NATS server.
        workers: By name.
        gateway_url: Of the gateway, once it listens.
    """

    def __init__(
        self,
        model_path: Path | str,
        *,
        model: str,
        roles: Sequence[Role] = ("prefill", "decode"),
        flags: Sequence[str] = (),
        role_flags: Mapping[Role, Sequence[str]] | None = None,
        own_flags: Sequence[Sequence[str]] = (),
        env: Mapping[str, str | None] | None = None,
        metrics_port: int | None = None,
        scripted: Path | None = None,
        gateway: str | None = None,
        gateway_env: Mapping[str, str | None] | None = None,
        directory: Path | None = None,
        port: int = 0,
        ready_timeout: float = READY_TIMEOUT,
        grace: float = GRACE,
        report: Report | None = None,
    ) -> None:
        self.model = model
        self.directory = directory or Path(tempfile.mkdtemp(prefix="inferbus-"))
        self.server = NatsServer(self.directory / "nats", port=port)
        self.workers: dict[str, Child] = {}
        self.gateway_url: str | None = None
        self._temporary = directory is None
        self._model_path = model_path
        self._roles = roles
        self._flags = flags
        self._role_flags = role_flags or {}
        self._own_flags = own_flags or [()] * len(roles)
        self._env = env or {}
        self._metrics_port = metrics_port
        self._scripted = scripted
        self._gateway = gateway
        self._gateway_env = gateway_env or {}
        self._ready_timeout = ready_timeout
        self._report = report or _silent
        self._grace = grace
        self._children = Children(grace=grace + STOP_MARGIN)
        self._exit = AsyncExitStack()

    @property
    def url(self) -> str:
        """Where clients connect."""
        return self.server.url

    async def failed(self) -> StackError:
        """Waits until the server or a worker ends unexpectedly; the error says which and why."""
        server = asyncio.ensure_future(self.server.child.wait())
        worker = asyncio.ensure_future(self._children.first_exit())
        try:
            await asyncio.wait([server, worker], return_when=asyncio.FIRST_COMPLETED)
            child = worker.result() if worker.done() else self.server.child
            return child.exited()
        finally:
            server.cancel()
            worker.cancel()

    async def add(self, role: Role, flags: Sequence[str] = ()) -> str:
        """Starts one more worker like the others, waits until it is ready, and returns its name.

        Args:
            role: Of the worker.
            flags: SGLang's, for it alone.
        """
        started = time.monotonic()
        name = await self._start(role, flags, free_ports(1)[0])
        await self._ready(started, {name: self.workers[name]})
        return name

    async def __aenter__(self) -> LocalStack:
        try:
            await self._exit.enter_async_context(self.server)
            self._report(f"NATS server with JetStream at {self.url}")
            await self._exit.enter_async_context(self._children)
            if self._gateway is not None:
                await self._start_gateway(self._gateway)
            started = time.monotonic()
            ports = free_ports(len(self._roles))
            for role, flags, port in zip(self._roles, self._own_flags, ports, strict=True):
                await self._start(role, flags, port)
            await self._ready(started, self.workers)
        except BaseException as error:
            await self._close(keep=isinstance(error, StackError))
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._close(keep=isinstance(error, Exception))

    async def _close(self, *, keep: bool) -> None:
        try:
            await self._exit.aclose()
        finally:
            if self._temporary and not keep:
                shutil.rmtree(self.directory, ignore_errors=True)

    async def _start(self, role: Role, flags: Sequence[str], port: int) -> str:
        name = f"{role}-{secrets.token_hex(2)}"
        command = [*PROGRAM, "worker", role]
        if self._scripted is not None:
            command += ["--scripted", str(self._scripted)]
        else:
            # Everything runs on this machine.
            command += ["--model-path", str(self._model_path), "--host", HOST]
            # Engines that start at the same time can choose the same port by themselves.
            command += ["--nccl-port", str(port)]
            command += [*self._flags, *self._role_flags.get(role, ()), *flags]
        child = await spawn(name, command, log=self.directory / f"{name}.log", env=self._environment(name))
        self.workers[name] = self._children.add(child)
        return name

    async def _start_gateway(self, listen: str) -> None:
        """Starts the gateway, first of all: an address that is taken is told before engines load."""
        host, _, port = listen.rpartition(":")
        address = f"{host}:{free_ports(1)[0]}" if port == "0" else listen
        env = {**self._bus(), **self._gateway_env, f"{ENVIRONMENT}GATEWAY_LISTEN": address}
        log = self.directory / "gateway.log"
        child = await spawn("gateway", [*PROGRAM, "gateway"], log=log, env=env)
        self._children.add(child)
        url = f"http://{address}"

        async def listening() -> bool:
            return any(line == f"listening on {url}" for line in child.tail())

        await child.until(listening, timeout=GATEWAY_TIMEOUT)
        self.gateway_url = url
        self._report(f"OpenAI's API at {url}/v1")

    def _bus(self) -> dict[str, str | None]:
        """The variables that lead to this server, and to no other that is inherited."""
        inherited = dict.fromkeys(name for name in os.environ if name.startswith(f"{ENVIRONMENT}NATS_"))
        return {**inherited, f"{ENVIRONMENT}NATS_URL": self.url}

    def _environment(self, worker: str) -> dict[str, str | None]:
        """The environment of a worker."""
        return {
            **self._bus(),
            f"{ENVIRONMENT}WORKER": worker,
            f"{ENVIRONMENT}SERVED_MODEL": self.model,
            f"{ENVIRONMENT}GRACE": str(self._grace),
            # Determining it would need a network.
            "SGLANG_HOST_IP": HOST,
            **self._env,
            **self._metrics(),
        }

    def _metrics(self) -> dict[str, str]:
        port = self._metrics_port
        if port is None:
            return {}
        # Every worker is added after its environment is made.
        return {f"{ENVIRONMENT}METRICS_PORT": str(port + len(self.workers) if port else 0)}

    async def _ready(self, started: float, workers: Mapping[str, Child]) -> None:
        """Waits until each of these has announced itself."""
        async with Client.connect(self.url, name="inferbus stack") as client:
            waiting = {
                asyncio.create_task(self._worker_ready(client, name, child)): name
                for name, child in workers.items()
            }
            try:
                for done in asyncio.as_completed(waiting):
                    name = await done
                    self._report(f"{name} is ready after {time.monotonic() - started:.0f} s")
            finally:
                for task in waiting:
                    task.cancel()
                await asyncio.gather(*waiting, return_exceptions=True)

    async def _worker_ready(self, client: Client, name: str, child: Child) -> str:
        try:
            await child.until(lambda: _announced(client, name), timeout=self._ready_timeout, poll=LOOK_EVERY)
        except ProcessExited:
            info = await _find(client, name)
            if info is not None and info.reason:
                raise WorkerFailed(name, info.reason, child.log) from None
            raise
        return name


async def _announced(client: Client, name: str) -> bool:
    info = await _find(client, name)
    return info is not None and info.state == "ready"


async def _find(client: Client, name: str) -> WorkerInfo | None:
    try:
        workers = await client.workers()
    except BusUnavailable as error:
        log.debug("stack.registry_not_read", reason=error.message)
        return None
    return next((info for info in workers if info.worker == name), None)


def _silent(_line: str) -> None:
    pass


def free_ports(count: int) -> list[int]:
    """Different free ports of this machine, outside the range of outgoing connections."""
    ports: list[int] = []
    with ExitStack() as held:
        for port in random.sample(PORTS, len(PORTS)):
            if len(ports) == count:
                break
            listener = held.enter_context(socket.socket())
            with contextlib.suppress(OSError):
                listener.bind((HOST, port))
                ports.append(port)
    return ports
