"""An engine that runs in another process, behind the same interface; see `engine_host`.

It holds no connection between operations, so any event loop may use it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import msgspec

from inferbus.schemas.answers import (
    ComputedAnswer,
    DetokenizeAnswer,
    EmbeddingsAnswer,
    TokenAnswer,
    TokenChunk,
    TokenizeAnswer,
)
from inferbus.schemas.computed import FILLED_IN, AnyComputed, TokenizeRequest
from inferbus.schemas.errors import ErrorBody, InferbusError, from_body
from inferbus.schemas.fleet import Role
from inferbus.schemas.requests import AnyRequest
from inferbus.workers.engine.interface import (
    AnswerIdentity,
    Delta,
    EngineInfo,
    EngineLoad,
    Leg,
)
from tests.support.engine_host import Channel

# What a two-core machine needs for several engines at once, measured: one compute thread each. Nothing counts
# towards coverage there, so nothing is traced.
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", "COVERAGE_PROCESS_CONFIG": ""}

LAST = ("nice", "-n", "19")
"""It computes when nobody else does: engines start while other tests run."""


class RemoteEngine:
    """`inferbus.workers.engine.interface.Engine` in a process that this one starts.

    Args:
        role: The worker's.
        folder: For the socket and the log.
        argv: SGLang's own flags, without the model, which is `tiny`.
    """

    def __init__(self, role: Role, folder: Path, argv: Sequence[str], **environment: str) -> None:
        self.log = folder / "log"
        self._path = str(folder / "socket")
        self.info: EngineInfo
        self.pid = 0
        self.children: list[int] = []
        self.process: subprocess.Popen[bytes] | None = None
        if self._reachable():  # Left running by an earlier test run; see the fixtures.
            return
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "socket").unlink(missing_ok=True)
        host = [sys.executable, "-m", "tests.support.engine_host", role, self._path, *argv]
        with self.log.open("wb") as output:
            self.process = subprocess.Popen(
                [*LAST, *host],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=os.environ | ENVIRONMENT | environment,
                # No session of its own: Linux weighs sessions against each other, whatever their priority.
                process_group=0,
            )

    def wait_ready(self, within: float = 800.0) -> None:
        """Waits until the engine is up."""
        until = time.monotonic() + within
        while not self._reachable():
            assert self.process is not None
            if self.process.poll() is not None or time.monotonic() > until:
                self.stop()
                tail = "\n".join(self.log.read_text(errors="replace").splitlines()[-40:])
                raise AssertionError(f"the engine did not start (exit {self.process.returncode}):\n{tail}")
            time.sleep(0.2)
        answer = asyncio.run(self._ask(do="info"))
        self.info = msgspec.convert(answer["info"], EngineInfo)
        self.pid, self.children = answer["pid"], answer["children"]

    def stop(self) -> None:
        """Ends the process and everything below it, where it was started here."""
        if self.process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def _reachable(self) -> bool:
        with socket.socket(socket.AF_UNIX) as probe:
            try:
                probe.connect(self._path)
            except OSError:
                return False
        return True

    async def prepare(self, request: AnyRequest) -> RemotePrompt:
        """As the interface says; the request goes over as the body that it came from."""
        body = {
            name: value
            for name, value in msgspec.to_builtins(request).items()
            if name not in ("sampling", "warnings")
        }
        answer = await self._ask(do="prepare", kind=request.kind, body=body | request.sampling.given())
        request.warnings = answer["warnings"]
        return RemotePrompt(self, answer)

    async def plan(self, request: AnyComputed) -> RemoteComputation:
        """As the interface says; it is answered at once, there."""
        body = {name: value for name, value in msgspec.to_builtins(request).items() if name not in FILLED_IN}
        if isinstance(request, TokenizeRequest) and request.chat is not None:
            chat = msgspec.to_builtins(request.chat)
            body |= {name: value for name, value in chat.items() if name not in ("sampling", "warnings")}
        answer = await self._ask(do="plan", kind=request.kind, body=body, priority=0)
        return RemoteComputation(request.kind, answer)

    async def generate(self, leg: Leg) -> AsyncGenerator[Delta, None]:
        """As the interface says."""
        async with self.call(do="generate", leg=leg) as channel:
            while "delta" in (frame := _checked(await channel.receive())):
                yield msgspec.convert(frame["delta"], Delta)

    def abort(self, rid: str) -> None:
        """As the interface says; a blocking call, so that it has happened when this returns."""
        body = msgspec.msgpack.encode({"do": "abort", "rid": rid})
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(10)
            connection.connect(self._path)
            connection.sendall(len(body).to_bytes(4, "big") + body)
            connection.recv(64)

    async def load(self) -> EngineLoad:
        """As the interface says."""
        return msgspec.convert((await self._ask(do="load"))["load"], EngineLoad)

    async def healthy(self, *, fresh: float | None = None) -> bool:
        """As the interface says; `fresh` is how many seconds ago a sign of life may be."""
        return bool((await self._ask(do="healthy", fresh=fresh))["healthy"])

    async def terms(self) -> int:
        """How often SIGTERM reached the program."""
        count: int = (await self._ask(do="terms"))["terms"]
        return count

    async def close(self) -> None:
        """As the interface says."""
        self.stop()

    async def http(self, path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        """What SGLang's own HTTP server answers on this engine: a status and a body."""
        answer = await self._ask(do="http", path=path, body=body)
        return answer["status"], answer["body"]

    async def bare(self, **fields: Any) -> list[int]:
        """The tokens of a call of SGLang's engine itself."""
        token_ids: list[int] = (await self._ask(do="bare", fields=fields))["token_ids"]
        return token_ids

    async def bare_text(self, **fields: Any) -> str:
        """The text of such a call, which does not stream."""
        text: str = (await self._ask(do="bare_text", fields=fields))["text"]
        return text

    async def _ask(self, **call: Any) -> dict[str, Any]:
        async with self.call(**call) as channel:
            return _checked(await channel.receive())

    @contextlib.asynccontextmanager
    async def call(self, **call: Any) -> AsyncIterator[Channel]:
        """One operation's connection."""
        channel = Channel(*await asyncio.open_unix_connection(self._path))
        try:
            await channel.send(call)
            yield channel
        finally:
            await channel.close()


class RemoteComputation:
    """`Computation` that the engine's process has answered."""

    _ANSWERS: ClassVar[dict[str, type[ComputedAnswer]]] = {
        "embeddings": EmbeddingsAnswer,
        "tokenize": TokenizeAnswer,
        "detokenize": DetokenizeAnswer,
    }

    def __init__(self, kind: str, answer: dict[str, Any]) -> None:
        self.prompt_tokens: int = answer["prompt_tokens"]
        self._answer: ComputedAnswer = msgspec.convert(answer["answer"], self._ANSWERS[kind])

    async def answer(self, priority: int) -> ComputedAnswer:
        """As the interface says."""
        return self._answer


class RemotePrompt:
    """`Prompt` that is kept in the engine's process."""

    def __init__(self, engine: RemoteEngine, answer: dict[str, Any]) -> None:
        self._engine = engine
        self._id: int = answer["prompt"]
        self._legs = msgspec.convert(answer["legs"], list[Leg])
        self.token_ids: list[int] = answer["token_ids"]

    @property
    def choices(self) -> int:
        """As the interface says."""
        return len(self._legs)

    def leg(self, index: int, *, rid: str) -> Leg:
        """As the interface says."""
        return msgspec.structs.replace(self._legs[index], rid=rid)

    def answer(self, identity: AnswerIdentity | None = None) -> RemoteAnswer:
        """As the interface says."""
        return RemoteAnswer(self._engine, self._id, identity or AnswerIdentity.new())

    def resumed(self, token_ids: list[int], text: str) -> RemotePrompt | None:
        """As the interface says: a job of these tests starts anew."""
        return None


class RemoteAnswer:
    """`AnswerFormatter` that is formatted in the engine's process."""

    def __init__(self, engine: RemoteEngine, prompt: int, identity: AnswerIdentity) -> None:
        self._engine = engine
        self._prompt = prompt
        self._identity = identity
        self._whole: Any = None

    async def chunks(self, deltas: AsyncIterable[Delta]) -> AsyncGenerator[msgspec.Struct | bytes, None]:
        """As the interface says."""
        async with self._engine.call(do="answer", prompt=self._prompt, identity=self._identity) as channel:
            feeding = asyncio.create_task(_feed(channel, deltas))
            try:
                while "message" in (frame := _checked(await channel.receive())):
                    yield _message(frame["message"], TokenChunk)
                await feeding
                await channel.send({})
                self._whole = _message(_checked(await channel.receive())["message"], TokenAnswer)
            except EOFError:
                await feeding  # What the deltas raised.
                raise
            finally:
                feeding.cancel()

    def whole(self) -> msgspec.Struct | bytes:
        """As the interface says."""
        assert self._whole is not None, "the chunks are not exhausted"
        whole: msgspec.Struct | bytes = self._whole
        return whole


async def _feed(channel: Channel, deltas: AsyncIterable[Delta]) -> None:
    try:
        async for delta in deltas:
            await channel.send(delta)
    except InferbusError:
        await channel.close()
        raise
    await channel.send(None)


def _message(value: Any, kind: type[msgspec.Struct]) -> msgspec.Struct | bytes:
    return value if isinstance(value, bytes) else msgspec.convert(value, kind)


def _checked(frame: dict[str, Any]) -> dict[str, Any]:
    if "error" in frame:
        raise from_body(msgspec.convert(frame["error"], ErrorBody))
    return frame
