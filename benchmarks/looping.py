"""Keeps streams open in a closed loop, in a process of its own, and counts the tokens that come.

    python -m benchmarks.looping READER URL STREAMS SECONDS worker=PID server=PID

Its last line is a `Loop` as JSON. The readers are `client`, our Python client with live requests; `durable`,
the same with jobs whose chunks are read as they come; and `nats-py`, which decodes and checks nothing.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Final, Literal

import msgspec
import nats
import uvloop
from nats.aio.client import Client as Nats

from benchmarks.load import LoadFailed, encode
from benchmarks.machine import Watch
from benchmarks.report import Quantiles
from inferbus.schemas import headers
from inferbus.schemas.answers import TokenChunk
from inferbus.schemas.subjects import Subjects
from inferbus.workers.client import Client

MODEL: Final = "scripted"
TOKENS: Final = 128
"""Of an answer, each in a chunk of its own."""
WARM: Final = 1.0
"""Seconds before the reading begins."""

Reader = Literal["client", "durable", "nats-py"]
Stream = Callable[[], AsyncIterator[int]]
"""Sends a request, and yields how many tokens came with each chunk."""


class Loop(msgspec.Struct, kw_only=True):
    """What a window of time gave; CPU in microseconds a token.

    Attributes:
        tokens: That came, one a chunk; a job that was done before it was read gives all in one.
        seconds: The window's.
        reader_us: CPU of this process.
        cpu_us: CPU of the others, by their names.
        first: From the call to the first chunk, of requests that began within the window.
        others: Cores that programs outside used.
        stolen: Cores that the hypervisor kept.
    """

    tokens: int
    seconds: float
    reader_us: float
    cpu_us: dict[str, float]
    first: Quantiles | None
    others: float
    stolen: float


class _Tally:
    def __init__(self) -> None:
        self.tokens = 0
        self.first: list[float] = []


async def window(stream: Stream, streams: int, seconds: float, processes: dict[str, int]) -> Loop:
    """Keeps so many streams open, and counts for so long.

    Raises:
        LoadFailed: An answer was not whole.
    """
    tally, stop = _Tally(), asyncio.Event()

    async def keep_open() -> None:
        while not stop.is_set():
            counted, sent, got = tally, time.perf_counter(), 0
            async for tokens in stream():
                if not got:
                    counted.first.append(time.perf_counter() - sent)
                got += tokens
                tally.tokens += tokens
            if got != TOKENS:
                raise LoadFailed(f"an answer had {got} tokens of {TOKENS}")

    async with asyncio.TaskGroup() as group:
        for _ in range(streams):
            group.create_task(keep_open())
        await asyncio.sleep(WARM)
        tally = _Tally()
        with Watch(processes | {"reader": os.getpid()}, sessions=processes.values()) as watch:
            await asyncio.sleep(seconds)
        found = tally
        # What ends later belongs to no window.
        tally = _Tally()
        stop.set()
    cost = {name: round(cpu / max(found.tokens, 1) * 1e6, 2) for name, cpu in watch.cpu.items()}
    return Loop(
        tokens=found.tokens,
        seconds=watch.seconds,
        reader_us=cost.pop("reader"),
        cpu_us=cost,
        first=Quantiles.of(found.first),
        others=watch.others,
        stolen=watch.stolen,
    )


async def _nats_py(connection: Nats, subject: str, body: bytes) -> AsyncIterator[int]:
    """One answer by nats-py alone."""
    inbox = connection.new_inbox()
    subscription = await connection.subscribe(inbox)
    await connection.publish(subject, body, reply=inbox)
    async for message in subscription.messages:
        if message.headers and headers.STATUS in message.headers:
            break
        yield 1
    await subscription.unsubscribe()


async def _live(client: Client) -> AsyncIterator[int]:
    """One live answer."""
    async for chunk in client.tokens(MODEL, [1], max_tokens=TOKENS):
        yield len(chunk.token_ids)


async def _durable(client: Client) -> AsyncIterator[int]:
    """One job."""
    job = await client.submit("tokens", MODEL, {"token_ids": [1], "max_tokens": TOKENS})
    async for chunk in client.stream(job):
        if isinstance(chunk, TokenChunk):
            yield len(chunk.token_ids)


async def read(reader: Reader, url: str, streams: int, seconds: float, processes: dict[str, int]) -> Loop:
    """One reading."""
    if reader == "nats-py":
        connection = await nats.connect(url)
        subject, body = Subjects().request(MODEL, "tokens"), encode({"token_ids": [1], "max_tokens": TOKENS})
        try:
            return await window(lambda: _nats_py(connection, subject, body), streams, seconds, processes)
        finally:
            await connection.close()
    async with Client.connect(url) as client:
        if reader == "durable":
            return await window(lambda: _durable(client), streams, seconds, processes)
        return await window(lambda: _live(client), streams, seconds, processes)


def main(arguments: Sequence[str]) -> int:
    """Takes one reading and prints it."""
    reader, url, streams, seconds, *named = arguments
    pids = {name: int(pid) for name, _, pid in (each.partition("=") for each in named)}
    found = uvloop.run(read(msgspec.convert(reader, Reader), url, int(streams), float(seconds), pids))
    print(msgspec.json.encode(found).decode())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
