"""What is compared on one GPU: the bare engine, SGLang's own server, and workers behind NATS."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, Protocol

import msgspec

from benchmarks import handoffs
from benchmarks.http_load import Http
from benchmarks.load import LoadFailed, Sent, Tally, Wire, encode
from benchmarks.machine import Watch
from benchmarks.readings import Item, Taken
from benchmarks.told import MODEL, PLAN, Answer, write
from benchmarks.workload import Plan
from inferbus.schemas.fleet import Role
from inferbus.schemas.subjects import Subjects, escape
from inferbus.workers.client import Client
from inferbus.workers.client.messages import parse_result
from inferbus.workers.engine.cpu import defaults
from inferbus.workers.stack.local import LocalStack, free_ports
from inferbus.workers.stack.processes import Child, spawn
from inferbus.workers.stack.server import HOST

START_SECONDS: Final = 240.0
ITEM_SECONDS: Final = 120.0
KV_TOKENS: Final[dict[Role, int]] = {"both": 340_000, "prefill": 60_000, "decode": 180_000}
"""Room in the KV caches of two engines of the role `both`, or of two pairs, that share a GPU of 140 GiB."""
PATIENCE: Final = {"INFERBUS_PREFILL_TIMEOUT": "120"}
"""512 prompts at once are a queue of more seconds than a hand-off may take by default."""


class Layout(Protocol):
    """Something that answers requests on this GPU."""

    name: str

    @property
    def pid(self) -> int:
        """The process that holds the engine's tokenizer manager."""
        ...

    async def start(self) -> None:
        """Brings it up."""
        ...

    async def stop(self) -> None:
        """Leaves nothing of it."""
        ...

    async def take(self, item: Item, number: int) -> Taken:
        """Measures."""
        ...


class BareLayout:
    """`sgl.Engine` in a process of its own: `benchmarks.told`."""

    name = "bare"

    def __init__(
        self, model: str, flags: list[str], env: Mapping[str, str | None], plan: Plan, folder: Path
    ) -> None:
        self._model = model
        self._flags = flags
        self._env = {**env, "SGLANG_HOST_IP": HOST, PLAN: msgspec.json.encode(plan).decode()}
        self._orders = folder / "orders"
        self._log = folder / "bare.log"
        self._child: Child | None = None
        self._count = 0

    @property
    def pid(self) -> int:
        """The process that holds the engine's tokenizer manager."""
        return _running(self._child).pid

    async def start(self) -> None:
        """Brings it up."""
        self._orders.mkdir(parents=True, exist_ok=True)
        # Engines that start at the same time have been seen to draw the same one.
        flags = ["--model-path", self._model, "--host", HOST, "--nccl-port", str(free_ports(1)[0])]
        command = [sys.executable, "-m", "benchmarks.told", str(self._orders), *flags, *self._flags]
        self._child = await spawn("bare", command, log=self._log, env=self._env)
        await self._until(self._orders / "ready", START_SECONDS)

    async def stop(self) -> None:
        """Leaves nothing of it."""
        if self._child is not None:
            await self._child.stop(grace=5.0)

    async def take(self, item: Item, number: int) -> Taken:
        """Measures."""
        self._count += 1
        order, file = (self._orders / f"{self._count}.{end}" for end in ("order", "answer"))
        write(order, msgspec.json.encode((item, number)))
        await self._until(file, ITEM_SECONDS)
        answer = msgspec.json.decode(file.read_bytes(), type=Answer)
        if answer.taken is None:
            raise LoadFailed(answer.error)
        return answer.taken

    async def _until(self, file: Path, seconds: float) -> None:
        async def there() -> bool:
            return os.path.exists(file)  # noqa: ASYNC240

        await _running(self._child).until(there, timeout=seconds, poll=0.02)


class HttpLayout:
    """SGLang's own server, `sglang.launch_server`, asked over HTTP."""

    name = "http"

    def __init__(
        self,
        model: str,
        flags: list[str],
        env: Mapping[str, str | None],
        plan: Plan,
        folder: Path,
        *,
        cpu: bool,
    ) -> None:
        self._model = model
        self._flags = [*(_cpu_flags() if cpu else ()), *flags]
        self._env = {**env, "SGLANG_HOST_IP": HOST}
        self._plan = plan
        self._log = folder / "http.log"
        self._child: Child | None = None
        self._http: Http | None = None
        tokens = rb'"completion_tokens": *%d\b' % plan.answer
        self._whole = {"tokens": re.compile(tokens), "chat": re.compile(rb'"finish_reason": *"length"')}

    @property
    def pid(self) -> int:
        """The process that holds the engine's tokenizer manager, and serves HTTP."""
        return _running(self._child).pid

    async def start(self) -> None:
        """Brings it up."""
        port, nccl = free_ports(2)
        command = [sys.executable, "-m", "sglang.launch_server", "--model-path", self._model, "--host", HOST]
        command += ["--port", str(port), "--nccl-port", str(nccl), "--served-model-name", MODEL]
        # As workers have it.
        command += ["--incremental-streaming-output", "--log-level", "warning"]
        self._child = await spawn("http", [*command, *self._flags], log=self._log, env=self._env)

        async def healthy() -> bool:
            with contextlib.suppress(OSError, asyncio.IncompleteReadError):
                reader, writer = await asyncio.open_connection(HOST, port)
                writer.write(b"GET /health HTTP/1.1\r\nHost: m\r\nConnection: close\r\n\r\n")
                try:
                    return b" 200 " in await asyncio.wait_for(reader.readline(), 5.0)
                except TimeoutError:
                    return False
                finally:
                    writer.close()
            return False

        await self._child.until(healthy, timeout=START_SECONDS, poll=0.25)
        self._http = Http(HOST, port)

    async def stop(self) -> None:
        """Leaves nothing of it."""
        if self._child is not None:
            await self._child.stop(grace=5.0)

    async def take(self, item: Item, number: int) -> Taken:
        """Measures."""
        bodies = [encode(self._body(item, body)) for body in item.bodies(self._plan, number)]
        with Watch({"main": self.pid}, sessions=[self.pid]) as watch:
            taken = await asyncio.to_thread(self._taken, item, bodies, number)
        taken.cpu, taken.others, taken.stolen = watch.cpu["main"], watch.others, watch.stolen
        return taken

    def _taken(self, item: Item, bodies: list[bytes], number: int) -> Taken:
        assert self._http is not None
        path = "/generate" if item.kind == "tokens" else "/v1/chat/completions"
        whole = self._whole[item.kind]
        if item.what == "paced":
            sent = self._http.paced(path, bodies, item.due(number), whole=whole)
            return Taken.of(sent, self._plan.answer)
        moments: list[list[float]] = []
        concurrency = item.concurrency or len(bodies)
        tally = self._http.run(path, bodies, concurrency=concurrency, whole=whole, moments=moments)
        return _of_tally(tally, len(bodies) * self._plan.answer, moments)

    def _body(self, item: Item, body: dict[str, Any]) -> dict[str, Any]:
        """A request in the server's own form."""
        if item.kind == "chat":
            return {"model": MODEL, **body}
        sampling = {
            "max_new_tokens": body["max_tokens"],
            "temperature": body["temperature"],
            "ignore_eos": body["ignore_eos"],
        }
        streamed = item.what in ("streams", "paced")
        return {"input_ids": body["token_ids"], "sampling_params": sampling, "stream": streamed}


class FleetLayout:
    """Workers behind an embedded NATS server.

    Args:
        name: Of the layout.
        model: Folder.
        roles: Of the workers; the last one owns requests.
        flags: SGLang's for all.
        role_flags: And for one role.
        env: For the workers.
        plan: Lengths.
        folder: For logs and streams.
    """

    def __init__(
        self,
        name: str,
        model: str,
        *,
        roles: tuple[Role, ...],
        flags: list[str],
        role_flags: dict[Role, list[str]],
        env: Mapping[str, str | None],
        plan: Plan,
        folder: Path,
    ) -> None:
        self.name = name
        self._plan = plan
        self._stack = LocalStack(
            model,
            model=MODEL,
            roles=roles,
            flags=flags,
            role_flags=role_flags,
            env={**PATIENCE, **env},
            directory=folder / name,
            ready_timeout=START_SECONDS,
            grace=1.0,
        )
        self._exit = contextlib.AsyncExitStack()
        self._client: Client | None = None
        self._prefills: handoffs.Logs | None = None
        self._token_bytes: int | None = None

    @property
    def pid(self) -> int:
        """The process that holds the engine's tokenizer manager: of the last role, which owns requests."""
        return list(self._stack.workers.values())[-1].pid

    async def start(self) -> None:
        """Brings it up."""
        await self._exit.enter_async_context(self._stack)
        self._client = await self._exit.enter_async_context(Client.connect(self._stack.url, owner="bench"))
        logs = {name: child.log for name, child in self._stack.workers.items() if name.startswith("prefill-")}
        if logs:
            self._prefills = handoffs.Logs(logs)
            known = (handoffs.token_bytes(info.signature) for info in await self._client.workers())
            self._token_bytes = next(filter(None, known), None)

    async def stop(self) -> None:
        """Leaves nothing of it."""
        await self._exit.aclose()

    async def take(self, item: Item, number: int) -> Taken:
        """Measures."""
        assert self._client is not None
        bodies = item.bodies(self._plan, number)
        sessions = [self._stack.server.child.pid, *(each.pid for each in self._stack.workers.values())]
        if self._prefills is not None:
            # What was before is not this reading's.
            self._prefills.handoffs(self._plan.prompt, None)
        with Watch({"main": self.pid}, sessions=sessions) as watch:
            if item.what in ("jobs", "whole"):
                taken = await run_jobs(self._client, bodies, streamed=item.what == "jobs")
            else:
                taken = await asyncio.to_thread(self._live, item, [encode(body) for body in bodies], number)
        taken.cpu, taken.others, taken.stolen = watch.cpu["main"], watch.others, watch.stolen
        if self._prefills is not None:
            # A chat's prompt has more tokens than words.
            size = self._token_bytes if item.kind == "tokens" else None
            taken.handoffs = self._prefills.handoffs(self._plan.prompt, size)
        return taken

    def _live(self, item: Item, bodies: list[bytes], number: int) -> Taken:
        subject = Subjects().request(MODEL, item.kind)
        # A connection for each reading: with it goes whatever a reading that failed has left running.
        with Wire(self._stack.url) as wire:
            if item.what == "paced":
                sent: list[Sent] = wire.paced(subject, bodies, item.due(number))
                return Taken.of(sent, self._plan.answer)
            moments: dict[bytes, list[float]] = {}
            tally = wire.run(subject, bodies, concurrency=item.concurrency, moments=moments)
            return _of_tally(tally, len(bodies) * self._plan.answer, list(moments.values()))


async def run_jobs(
    client: Client, bodies: list[dict[str, Any]], *, streamed: bool, seconds: float = ITEM_SECONDS
) -> Taken:
    """Durable jobs for tokens, all handed in at once; over when the last result is stored.

    Args:
        client: Whose jobs they are.
        bodies: Requests that ignore the model's end.
        streamed: Whether their chunks are stored, too.
        seconds: That they may take after they were handed in.

    Raises:
        LoadFailed: A job failed, was tried again, or has not all of its tokens.
        TimeoutError: They took longer.
    """
    arrived, done = list[Any](), asyncio.Event()

    def received(message: Any) -> None:
        arrived.append(message)
        if len(arrived) == len(bodies):
            done.set()

    subscription = await client.bus.subscribe(f"infer.results.{escape(client.owner)}.*", received)
    try:
        await client.bus.flush()
        started = time.perf_counter()
        await asyncio.gather(*(client.submit("tokens", MODEL, body, stream=streamed) for body in bodies))
        await asyncio.wait_for(done.wait(), seconds)
        seconds = time.perf_counter() - started
    finally:
        await subscription.unsubscribe()
    results = [parse_result(message.data, message.headers) for message in arrived]
    tokens = sum(map(_tokens, results))
    again = sum(result.attempt > 1 for result in results)
    if tokens != sum(body["max_tokens"] for body in bodies) or again:
        raise LoadFailed(f"{tokens} tokens came of {len(bodies)} jobs, {again} of them tried again")
    return Taken(seconds=seconds, tokens=tokens)


def _running(child: Child | None) -> Child:
    assert child is not None, "not started"
    return child


def _of_tally(tally: Tally, tokens: int, moments: list[list[float]]) -> Taken:
    return Taken(
        seconds=tally.seconds,
        tokens=tokens,
        messages=tally.chunks,
        first=tally.first,
        moments=[times for times in moments if times],
    )


def _tokens(result: Any) -> int:
    if result.error is not None:
        raise LoadFailed(f"a job ended with {result.error}")
    return sum(len(choice.token_ids) for choice in result.answer.choices)


def _cpu_flags() -> list[str]:
    """What workers tell SGLang on a CPU."""
    flags = []
    for name, value in defaults("both").items():
        flag = f"--{name.replace('_', '-')}"
        flags += [flag] if value is True else [flag, str(value)]
    return flags
