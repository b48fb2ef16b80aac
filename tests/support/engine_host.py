"""A real engine in a process of its own, served on a Unix socket: the other end of `remote_engine`.

    python -m tests.support.engine_host ROLE SOCKET [SGLang's flags]

SGLang takes over signals, logging and the event loop policy of its process, binds itself to one event loop,
and ends its process when it dies; none of which a test runner wants. One connection is one operation. Frames
are MessagePack behind their length; a client that closes its connection closes the operation's generator.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import aclosing, suppress
from typing import Any

import httpx
import msgspec

from inferbus.schemas import requests
from inferbus.schemas.errors import InferbusError
from inferbus.schemas.fleet import Role
from inferbus.schemas.kinds import parse
from inferbus.workers.engine.interface import AnswerIdentity, Delta, Leg, Prompt
from inferbus.workers.engine.sglang import LaunchFailed, SGLangEngine, health
from inferbus.workers.stack import models


class Channel:
    """Frames on a connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    async def send(self, frame: Any) -> None:
        """Sends one."""
        body = msgspec.msgpack.encode(frame)
        self._writer.write(len(body).to_bytes(4, "big") + body)
        await self._writer.drain()

    async def receive(self) -> Any:
        """The next one; raises `EOFError` at the connection's end."""
        try:
            size = int.from_bytes(await self._reader.readexactly(4), "big")
            return msgspec.msgpack.decode(await self._reader.readexactly(size))
        except (asyncio.IncompleteReadError, ConnectionError):
            raise EOFError from None

    async def close(self) -> None:
        """Closes the connection."""
        self._writer.close()
        with suppress(ConnectionError):
            await self._writer.wait_closed()


def sglang_server(engine: Any) -> Any:
    """SGLang's HTTP server as an application, with its handlers on this engine."""
    from sglang.srt.entrypoints import http_server
    from sglang.srt.entrypoints.openai import serving_embedding, serving_tokenize

    manager, templates = engine.tokenizer_manager, engine.template_manager
    state = http_server.app.state
    state.openai_serving_embedding = serving_embedding.OpenAIServingEmbedding(manager, templates)
    state.openai_serving_tokenize = serving_tokenize.OpenAIServingTokenize(manager, templates)
    state.openai_serving_detokenize = serving_tokenize.OpenAIServingDetokenize(manager)
    return http_server.app


class Host:
    """Serves one engine."""

    def __init__(self, engine: SGLangEngine, role: Role) -> None:
        self._engine = engine
        self._sglang = engine._engine
        self._role = role
        self._prompts: list[Prompt] = []
        self.terms = 0

    def told_to_stop(self) -> None:
        """Handles SIGTERM by counting it."""
        self.terms += 1

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One operation."""
        channel = Channel(reader, writer)
        try:
            call = await channel.receive()
            await getattr(self, "_" + call.pop("do"))(channel, **call)
        except InferbusError as error:
            with suppress(ConnectionError):
                await channel.send({"error": error.body()})
        except (EOFError, ConnectionError):
            pass
        finally:
            await channel.close()

    async def _info(self, channel: Channel) -> None:
        children = self._sglang.get_all_child_pids()
        await channel.send({"info": self._engine.info, "pid": os.getpid(), "children": children})

    async def _load(self, channel: Channel) -> None:
        await channel.send({"load": await self._engine.load()})

    async def _healthy(self, channel: Channel, fresh: float | None) -> None:
        if fresh is None:
            healthy = await self._engine.healthy()
        else:
            healthy = await health.healthy(self._sglang, self._role, fresh=fresh)
        await channel.send({"healthy": healthy})

    async def _terms(self, channel: Channel) -> None:
        await channel.send({"terms": self.terms})

    async def _abort(self, channel: Channel, rid: str) -> None:
        self._engine.abort(rid)
        await channel.send({})

    async def _plan(self, channel: Channel, kind: Any, body: dict[str, Any], priority: int) -> None:
        request = parse(kind, body)
        assert not isinstance(request, requests.Request)
        computation = await self._engine.plan(request)
        answer = await computation.answer(priority)
        await channel.send({"prompt_tokens": computation.prompt_tokens, "answer": answer})

    async def _http(self, channel: Channel, path: str, body: dict[str, Any]) -> None:
        """A request to SGLang's own HTTP server, on this engine."""
        app = sglang_server(self._sglang)
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://sglang") as http:
            answer = await http.post(path, json=body)
        await channel.send({"status": answer.status_code, "body": answer.json()})

    async def _prepare(self, channel: Channel, kind: Any, body: dict[str, Any]) -> None:
        request = requests.parse(kind, body)
        prompt = await self._engine.prepare(request)
        self._prompts.append(prompt)
        legs = [prompt.leg(index, rid="") for index in range(prompt.choices)]
        await channel.send(
            {
                "prompt": len(self._prompts) - 1,
                "legs": legs,
                "token_ids": prompt.token_ids,
                "warnings": request.warnings,
            }
        )

    async def _generate(self, channel: Channel, leg: Any) -> None:
        async def run() -> None:
            async with aclosing(self._engine.generate(msgspec.convert(leg, Leg))) as deltas:
                async for delta in deltas:
                    await channel.send({"delta": delta})
            await channel.send({"end": True})

        async def gone() -> None:
            with suppress(EOFError):
                await channel.receive()

        running, leaving = asyncio.create_task(run()), asyncio.create_task(gone())
        await asyncio.wait((running, leaving), return_when=asyncio.FIRST_COMPLETED)
        leaving.cancel()
        if not running.done():
            running.cancel()
        with suppress(asyncio.CancelledError):
            await running

    async def _answer(self, channel: Channel, prompt: int, identity: Any) -> None:
        answer = self._prompts[prompt].answer(msgspec.convert(identity, AnswerIdentity))

        async def deltas() -> AsyncIterator[Delta]:
            while (frame := await channel.receive()) is not None:
                yield msgspec.convert(frame, Delta)

        async for message in answer.chunks(deltas()):
            await channel.send({"message": message})
        await channel.send({"end": True})
        await channel.receive()
        await channel.send({"message": answer.whole()})

    async def _bare(self, channel: Channel, fields: dict[str, Any]) -> None:
        """A call of SGLang's engine itself, without anything of ours."""
        ids: list[int] = []
        async for output in await self._sglang.async_generate(**fields, stream=True):
            ids += output["output_ids"]
        await channel.send({"token_ids": ids})

    async def _bare_text(self, channel: Channel, fields: dict[str, Any]) -> None:
        await channel.send({"text": (await self._sglang.async_generate(**fields))["text"]})


async def main(role: Role, path: str, argv: list[str]) -> int:
    """Serves until it is killed."""
    try:
        engine = await SGLangEngine.launch(
            ["--model-path", str(models.ensure("tiny")), *argv],
            role=role,
            model="tiny",
            advertise_host="127.0.0.1",
            transfer_timeout=10,
        )
    except LaunchFailed as error:
        sys.stderr.write(f"LaunchFailed: {error.message}\n")
        return 1
    host = Host(engine, role)
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, host.told_to_stop)
    server = await asyncio.start_unix_server(host.serve, path)
    async with server:
        await server.serve_forever()
    return 0


if __name__ == "__main__":
    sys.exit(asyncio.run(main(sys.argv[1], sys.argv[2], sys.argv[3:])))  # type: ignore[arg-type]
