"""A worker as plain as can be, on bare nats-py: a test decides what it sends, loses and repeats."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import nats
from nats.aio.client import Client as NatsClient
from nats.aio.msg import Msg

from inferbus.schemas.answers import TokenChunk
from inferbus.schemas.codec import JSON, encode
from inferbus.workers.client import AnswerStream, Chunk, Restarted, text
from tests.support.answers import USAGE, chat, chat_answer


class Responder:
    """Takes requests and cancels, and sends what it is told to.

    Attributes:
        nc: Its connection.
        requests: Live requests that came, not yet taken by the test.
        cancels: Cancel messages that came.
    """

    def __init__(self, nc: NatsClient) -> None:
        self.nc = nc
        self.requests: asyncio.Queue[Msg] = asyncio.Queue()
        self.cancels: asyncio.Queue[Msg] = asyncio.Queue()

    async def request(self) -> Msg:
        """The next live request."""
        async with asyncio.timeout(5):
            return await self.requests.get()

    async def cancel(self) -> Msg:
        """The next cancel message."""
        async with asyncio.timeout(5):
            return await self.cancels.get()

    async def send(
        self,
        to: str,
        *messages: Chunk | dict[str, Any],
        kind: str = JSON,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        """Sends messages as they are."""
        for message in messages:
            if to.startswith("infer.stream.") and isinstance(message, dict) and "job" in message:
                message = {**message, "job": to.rpartition(".")[2]}
            await self.nc.publish(to, encode(message, kind), headers=dict(headers) if headers else None)
        await self.nc.flush()

    async def end(self, to: str, count: int, status: str = "ok", *, attempt: int = 1, **more: str) -> None:
        """Sends the end mark."""
        headers = {
            "Infer-Status": status,
            "Infer-Chunks": str(count),
            "Infer-Attempt": str(attempt),
            "Infer-Worker": "d1",
            "Infer-Prefill-Worker": "p1",
            **{f"Infer-{key}": value for key, value in more.items()},
        }
        await self.nc.publish(to, b"", headers=headers)
        await self.nc.flush()

    async def answer(self, to: str, *texts: str) -> None:
        """A whole chat answer in chunks, with its end mark."""
        chunks = chunks_of(*texts)
        await self.send(to, *chunks)
        await self.end(to, len(chunks))

    async def store_result(
        self,
        owner: str,
        job: str,
        answer: str | dict[str, Any],
        *,
        submission: int,
        attempt: int = 1,
    ) -> None:
        """Stores a result: a chat answer with a text, or a body as it is."""
        body = chat_answer(answer, attempt=attempt) if isinstance(answer, str) else answer
        body = {**body, "job": job}
        headers = {
            "Infer-Status": "error" if "error" in body else "ok",
            "Infer-Attempt": str(attempt),
            "Infer-Submission": str(submission),
            "Infer-Worker": "d1",
        }
        stream = self.nc.jetstream()
        entrance = (await stream.stream_info("INFER_RESULTS")).config.subject_transform
        assert entrance is not None
        subject = entrance.src.replace(">", f"results.{owner}.{job}")
        await stream.publish(subject, json.dumps(body).encode(), headers=headers)


def chunks_of(*texts: str, attempt: int = 1) -> list[Chunk]:
    """The chunks of a chat answer, to the end."""
    chunks = [
        chat({"role": "assistant", "content": ""}),
        *(chat({"content": text}) for text in texts),
        chat({}, finish="stop"),
        chat(None, usage=USAGE),
    ]
    return [
        chunk | {"attempt": attempt, "seq": seq}
        for seq, chunk in enumerate(chunks)
        if isinstance(chunk, dict)
    ]


def tokens_of(*ids: list[int]) -> list[Chunk]:
    """The chunks of a token answer, to the end."""
    last = len(ids) - 1
    return [
        TokenChunk(
            job="j",
            attempt=1,
            seq=seq,
            index=0,
            token_ids=some,
            finish_reason="stop" if seq == last else None,
        )
        for seq, some in enumerate(ids)
    ]


async def read_into(seen: list[str], stream: AnswerStream[Any]) -> None:
    """Reads a stream's text into a list, where it can be looked at while it grows and after it broke."""
    async for event in stream:
        if isinstance(event, Restarted):
            seen.clear()
        seen.append(text(event))


@asynccontextmanager
async def responder(url: str, *, model: str = "m", **options: Any) -> AsyncIterator[Responder]:
    """A responder for a model."""
    nc = await nats.connect(url, **options)
    found = Responder(nc)

    async def on_request(message: Msg) -> None:
        found.requests.put_nowait(message)

    async def on_cancel(message: Msg) -> None:
        found.cancels.put_nowait(message)

    await nc.subscribe(f"infer.request.{model}.*", queue="workers", cb=on_request)
    await nc.subscribe("infer.cancel.>", cb=on_cancel)
    # nats-py writes its PING ahead of what is pending, so one PONG proves nothing of the subscriptions.
    await nc.flush()
    await nc.flush()
    try:
        yield found
    finally:
        await nc.close()
