"""What jobs and readers notice of trouble with the NATS server: nothing but time."""

from __future__ import annotations

import asyncio
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from inferbus.schemas.answers import TokenAnswer
from inferbus.schemas.errors import InferbusError
from inferbus.workers.bus.jetstream.client import JetStream
from inferbus.workers.client import Client, Job
from inferbus.workers.stack.processes import spawn
from inferbus.workers.stack.server import NatsServer
from tests.support.eventually import eventually
from tests.support.fleet import Fleet

pytestmark = pytest.mark.faults

OUTAGE = 60.0
"""Seconds; twice the ack wait that workers have by default."""

COUNTING = "[[rules]]\nlength = 40000\ndelay = 0.05\n"
LETTERS = 30_000
TORRENT = "context_length = 50000\nburst = 64\n[[rules]]\ncount = [97, 123]\nlength = 40000\n"

IMPATIENT = {"extra": 'max_pending: 1048576\nwrite_deadline: "100ms"\n'}
"""Of a server that cuts off whoever leaves more than a megabyte lying."""

SLOW_READER = """
import asyncio, sys
from inferbus.workers.bus.jetstream.client import JetStream
from inferbus.workers.client import Client, text

async def main() -> None:
    async with Client.connect(sys.argv[1]) as client:
        messages = [{"role": "user", "content": "Hi"}]
        job = await client.submit("chat", "scripted", {"messages": messages, "max_tokens": int(sys.argv[2])})
        seen = ""
        async for event in client.stream(job):
            if not seen:
                print("reading", job.id, flush=True)
            seen += text(event)
        told = (await client.result(job)).answer["choices"][0]["message"]["content"]
        print(len(told), seen == told, flush=True)

asyncio.run(main())
"""

LIVE_READER = """
import asyncio, sys
from inferbus.schemas.errors import InferbusError
from inferbus.workers.client import Client, text

async def main() -> None:
    async with Client.connect(sys.argv[1]) as client:
        messages = [{"role": "user", "content": "Hi"}]
        seen, how = "", "whole"
        try:
            async for event in client.chat("scripted", messages, max_tokens=int(sys.argv[2])):
                if not seen:
                    print("reading", flush=True)
                seen += text(event)
        except InferbusError as error:
            how = f"{error.code} {error.retryable}"
        letters = "abcdefghijklmnopqrstuvwxyz" * (len(seen) // 26 + 2)
        print(how, len(seen) == int(sys.argv[2]), seen in letters, flush=True)

asyncio.run(main())
"""


def body(tokens: int) -> dict[str, Any]:
    return {"token_ids": [1, 2], "max_tokens": tokens}


@pytest.mark.timeout(240)
async def test_a_minute_without_the_server_under_load_costs_no_job_and_doubles_none(
    client: Client, workers: Fleet, server: NatsServer
) -> None:
    await workers.start("both", COUNTING, ack_wait=30)
    await workers.start("both", COUNTING, ack_wait=30)
    lengths = [10 + 10 * (number % 9) for number in range(60)]
    jobs = [await client.submit("tokens", "scripted", body(length)) for length in lengths]
    live = client.tokens("scripted", [1, 2], max_tokens=400)
    streams = [client.stream(job) for job in jobs]
    reading = [asyncio.create_task(_tokens(stream)) for stream in streams]
    asking = asyncio.create_task(_tokens(live))
    await eventually(lambda: sum(task.done() for task in reading) > 5)
    await server.kill()
    handing_in = asyncio.create_task(_until_accepted(client, body(5)))
    await asyncio.sleep(OUTAGE)
    await server.restart()
    async with asyncio.timeout(90):
        seen = await asyncio.gather(*reading)
        late = await handing_in
        results = [await client.result(job) for job in (*jobs, late)]
    for length, tokens in zip(lengths, seen, strict=True):
        assert tokens == list(range(3, 3 + length))
    for length, result in zip((*lengths, 5), results, strict=True):
        assert isinstance(result.answer, TokenAnswer)
        assert result.answer.choices[0].token_ids == list(range(3, 3 + length))
    stored = await JetStream(client.bus).read("INFER_RESULTS", "infer.results.>")
    assert len(stored) == len(results)
    assert await asking == list(range(3, 403))
    await workers.idle(within=20)


async def test_a_full_stream_of_results_costs_no_answer_and_stops_the_taking_of_jobs(
    client: Client, workers: Fleet
) -> None:
    worker = await workers.start("both", COUNTING, ack_wait=2)
    jetstream = JetStream(client.bus)
    config = (await jetstream.call("STREAM.INFO.INFER_RESULTS"))["config"]
    await jetstream.call("STREAM.UPDATE.INFER_RESULTS", config | {"max_bytes": 1})
    first = await client.submit("tokens", "scripted", body(5))
    await eventually(lambda: workers.events(worker, "results.full"))

    async def announced() -> bool:
        return any("full" in (info.reason or "") for info in await client.workers())

    await eventually(announced)

    async def asks_for_nothing() -> bool:
        info = await jetstream.call("CONSUMER.INFO.INFER_JOBS.scripted-batch")
        return int(info["num_waiting"]) == 0

    await eventually(asks_for_nothing)
    second = await client.submit("tokens", "scripted", body(5))
    # Signs of life for longer than the ack wait: the answer is kept, and its job is not delivered again.
    beats: list[bytes] = []
    heard = await client.bus.subscribe("$JS.ACK.INFER_JOBS.>", lambda message: beats.append(message.data))
    await eventually(lambda: beats.count(b"+WPI") >= 6, within=20)
    await heard.unsubscribe()
    assert len(workers.events(worker, "job.started")) == 1
    await jetstream.call("STREAM.UPDATE.INFER_RESULTS", config)
    results = [await client.result(job, timeout=20) for job in (first, second)]
    assert [(result.status, result.attempt) for result in results] == [("ok", 1), ("ok", 1)]
    assert len(workers.events(worker, "job.started")) == 2


async def _tokens(stream: Any) -> list[int]:
    return [token async for event in stream for token in event.token_ids]


async def _until_accepted(client: Client, request: dict[str, Any]) -> Job:
    """As a submitter does that must not lose a job: the same id again, until the server has it."""
    while True:
        try:
            return await client.submit("tokens", "scripted", request, job_id="late")
        except InferbusError as error:
            assert error.retryable  # noqa: PT017


@pytest.mark.parametrize("server", [IMPATIENT], indirect=True, ids=["impatient"])
async def test_a_reader_that_stood_still_and_was_cut_off_as_a_slow_consumer_misses_nothing(
    client: Client, workers: Fleet, server: NatsServer, tmp_path: Path
) -> None:
    await workers.start("both", TORRENT)
    log = tmp_path / "reader.log"
    command = [sys.executable, "-c", SLOW_READER, server.url, str(LETTERS)]
    reader = await spawn("reader", command, log=log, cwd=Path.cwd())
    try:
        await eventually(lambda: "reading" in log.read_text(), within=30)
        reader.send_signal(signal.SIGSTOP)
        await client.result(log.read_text().split()[1], timeout=60)
        reader.send_signal(signal.SIGCONT)
        assert await asyncio.wait_for(reader.wait(), 60) == 0
    finally:
        await reader.stop()
    assert log.read_text().splitlines()[-1] == f"{LETTERS} True"
    assert "Slow Consumer" in (tmp_path / "nats" / "nats-server.log").read_text()


@pytest.mark.parametrize("server", [IMPATIENT], indirect=True, ids=["impatient"])
@pytest.mark.parametrize(
    ("kept", "said"),
    [(64, "whole True True"), (1, "connection_lost True False True")],
    ids=["all is kept", "the newest MiB is kept"],
)
async def test_a_live_reader_that_was_cut_off_as_a_slow_consumer_goes_on_or_says_that_it_cannot(
    workers: Fleet, server: NatsServer, tmp_path: Path, kept: int, said: str
) -> None:
    before = f"from inferbus.workers.jobs import retained\nretained.ANSWER_BYTES = {kept} * 1024 * 1024\n"
    worker = await workers.start("both", TORRENT.replace("0000", "00000"), before=before)
    log = tmp_path / "reader.log"
    # More than the buffers of two sockets hold.
    command = [sys.executable, "-c", LIVE_READER, server.url, str(2 * LETTERS)]
    reader = await spawn("reader", command, log=log, cwd=Path.cwd())
    try:
        await eventually(lambda: "reading" in log.read_text(), within=30)
        reader.send_signal(signal.SIGSTOP)
        await eventually(lambda: workers.events(worker, "request.finished"), within=60)
        reader.send_signal(signal.SIGCONT)
        assert await asyncio.wait_for(reader.wait(), 60) == 0
    finally:
        await reader.stop()
    assert log.read_text().splitlines()[-1] == said
    assert "Slow Consumer" in (tmp_path / "nats" / "nats-server.log").read_text()
