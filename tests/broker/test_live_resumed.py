"""Live answers whose connection breaks in the middle: they go on, exactly, or say why they cannot."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from inferbus.schemas.answers import TokenAnswer, TokenChunk
from inferbus.schemas.errors import InferbusError
from inferbus.workers.bus.connection import bus
from inferbus.workers.client import AnswerStream, Client, ConnectionLost, live, text
from inferbus.workers.config import BusSettings
from inferbus.workers.stack.processes import Child
from inferbus.workers.stack.server import NatsServer
from tests.support.eventually import eventually
from tests.support.fleet import MODEL, Fleet, fleet
from tests.support.line import Line

SENTENCE = "Ein Faden reißt, und doch: 一个人工智能 🧵 spricht weiter, wo es aufgehört hat."
SCRIPT = f'tokenizer = true\n[[rules]]\ntext = "{SENTENCE}"\ndelay = 0.02\n'
COUNTING = "[[rules]]\nlength = 100000\ndelay = 0.02\n"
COUNT = 150
EXPECTED = list(range(3, 3 + COUNT))
HELLO = [{"role": "user", "content": "Hi"}]


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[NatsServer]:
    async with NatsServer(tmp_path / "nats", sync_interval=None) as found:
        yield found


@pytest.fixture
async def workers(server: NatsServer, tmp_path: Path) -> AsyncIterator[Fleet]:
    async with fleet(server, tmp_path) as found:
        yield found


@pytest.fixture
async def line(server: NatsServer) -> AsyncIterator[Line]:
    found = Line(server)
    await found.mend()
    yield found
    await found.cut()


@pytest.fixture
async def client(line: Line) -> AsyncIterator[Client]:
    """Behind the line, and without a limit to its patience: nothing here may need one."""
    settings = BusSettings(urls=(line.url,))
    async with Client.connect(settings, timeout=None) as found:
        yield found


class Reading:
    """Reads a stream in a task of its own.

    Attributes:
        tokens: That have come.
        text: That has come.
        events: The chunks themselves.
    """

    def __init__(self, stream: AnswerStream[Any]) -> None:
        self.stream = stream
        self.tokens: list[int] = []
        self.text = ""
        self.events: list[Any] = []
        self._go = asyncio.Event()
        self._go.set()
        self._task = asyncio.create_task(self._read())

    def pause(self) -> None:
        """Takes nothing more from the stream."""
        self._go.clear()

    def go_on(self) -> None:
        """Takes again."""
        self._go.set()

    async def end(self) -> None:
        """Waits for the answer's end."""
        async with asyncio.timeout(30):
            await self._task

    async def _read(self) -> None:
        async for event in self.stream:
            self.events.append(event)
            if isinstance(event, TokenChunk):
                self.tokens += event.token_ids
            self.text += text(event)
            await self._go.wait()


def numbers(reading: Reading) -> list[int]:
    """Of the chunks."""
    return [event.seq if isinstance(event, TokenChunk) else event["seq"] for event in reading.events]


async def finished(workers: Fleet, worker: Child, status: str = "ok") -> None:
    """Waits until a worker has ended a live request."""

    def ended() -> bool:
        return any(event["status"] == status for event in workers.events(worker, "request.finished"))

    await eventually(ended, within=20, what=f"a request that ended with {status}")


async def test_an_answer_goes_on_where_its_readers_connection_broke(
    client: Client, workers: Fleet, line: Line
) -> None:
    await workers.start("both", COUNTING)
    reading = Reading(client.tokens(MODEL, [1, 2], max_tokens=2 * COUNT))
    for number in (20, COUNT):
        await eventually(lambda number=number: len(reading.tokens) > number)
        await line.cut()
        await eventually(lambda: not client.bus.connected)
        await line.mend()
    await reading.end()
    assert client.bus.reconnects
    assert reading.tokens == list(range(3, 3 + 2 * COUNT))
    assert numbers(reading) == list(range(len(reading.events)))
    assert reading.stream.status == "ok"


async def test_a_chat_that_ended_meanwhile_is_read_to_its_end(
    client: Client, workers: Fleet, line: Line
) -> None:
    worker = await workers.start("both", SCRIPT)
    reading = Reading(client.chat(MODEL, HELLO))
    whole = asyncio.ensure_future(client.chat(MODEL, HELLO, stream=False).answer())
    await eventually(lambda: len(reading.text) > 10)
    await line.cut()
    await eventually(lambda: len(workers.events(worker, "request.finished")) == 2, within=20)
    await line.mend()
    await reading.end()
    assert reading.text == SENTENCE
    assert reading.stream.worker == worker.name
    answer: Any = await whole
    assert answer["choices"][0]["message"]["content"] == SENTENCE


async def test_a_reader_that_takes_its_time_misses_nothing_of_what_came_meanwhile(
    client: Client, workers: Fleet, line: Line
) -> None:
    """What was missed is asked for when the connection is back, not when somebody reads on."""
    worker = await workers.start("both", COUNTING)
    reading = Reading(client.tokens(MODEL, [1, 2], max_tokens=COUNT))
    await eventually(lambda: len(reading.tokens) > 20)
    reading.pause()
    await line.cut()
    await finished(workers, worker)
    await line.mend()
    await eventually(lambda: workers.events(worker, "answer.sent_again"))
    reading.go_on()
    await reading.end()
    assert reading.tokens == EXPECTED


async def test_an_answer_goes_on_when_its_workers_connection_broke(
    server: NatsServer, line: Line, workers: Fleet
) -> None:
    worker = await workers.start("both", COUNTING, nats_url=line.url)
    async with Client.connect(server.url, timeout=None) as client:
        reading = Reading(client.tokens(MODEL, [1, 2], max_tokens=COUNT))
        await eventually(lambda: len(reading.tokens) > 20)
        await line.cut()
        await eventually(lambda: workers.events(worker, "bus.disconnected"))
        await line.mend()
        await reading.end()
    assert reading.tokens == EXPECTED


@pytest.mark.faults
async def test_an_answer_goes_on_after_the_server_was_killed(server: NatsServer, workers: Fleet) -> None:
    await workers.start("both", COUNTING)
    async with Client.connect(server.url) as client:
        reading = Reading(client.tokens(MODEL, [1, 2], max_tokens=COUNT))
        await eventually(lambda: len(reading.tokens) > 20)
        await server.kill()
        await server.restart()
        await reading.end()
    assert reading.tokens == EXPECTED


@pytest.mark.faults
async def test_time_without_the_server_is_not_the_callers(server: NatsServer, workers: Fleet) -> None:
    """What ended while nobody could ask for it is kept, however short answers are kept else."""
    short = "from inferbus.workers.jobs import retained\nretained.AWAY = 0.05\nretained.SWEEP = 0.01\n"
    worker = await workers.start("both", COUNTING, before=short)
    async with Client.connect(server.url) as client:
        reading = Reading(client.tokens(MODEL, [1, 2], max_tokens=COUNT))
        await eventually(lambda: len(reading.tokens) > 20)
        await server.kill()
        await finished(workers, worker)
        await server.restart()
        await reading.end()
    assert reading.tokens == EXPECTED


async def test_what_is_not_kept_any_more_ends_the_answer_with_an_error_that_says_so(
    client: Client, workers: Fleet, line: Line
) -> None:
    few = "from inferbus.workers.jobs import retained\nretained.ANSWER_BYTES = retained.STEP = 2000\n"
    worker = await workers.start("both", COUNTING, before=few)
    reading = Reading(client.tokens(MODEL, [1, 2], max_tokens=COUNT))
    await eventually(lambda: len(reading.tokens) > 20)
    await line.cut()
    await finished(workers, worker)
    await line.mend()
    with pytest.raises(ConnectionLost, match="send the request again") as caught:
        await reading.end()
    assert caught.value.retryable
    assert reading.tokens == EXPECTED[: len(reading.tokens)]


async def test_an_answer_that_was_dropped_is_told_of_at_once(
    client: Client, workers: Fleet, line: Line, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is kept here once an answer has ended."""
    nothing = "from inferbus.workers.jobs import retained\nretained.TOTAL_BYTES = 0\n"
    worker = await workers.start("both", COUNTING, before=nothing)
    reading = Reading(client.tokens(MODEL, [1, 2], max_tokens=COUNT))
    await eventually(lambda: len(reading.tokens) > 20)
    await line.cut()
    await finished(workers, worker)
    # No second question is needed.
    monkeypatch.setattr(reading.stream, "_ask_every", 1000)
    await line.mend()
    with pytest.raises(ConnectionLost):
        await reading.end()
    assert reading.tokens == EXPECTED[: len(reading.tokens)]


async def test_who_cancels_without_a_connection_is_heard_when_it_is_back(
    client: Client, workers: Fleet, line: Line
) -> None:
    worker = await workers.start("both", COUNTING)
    reading = Reading(client.tokens(MODEL, [1, 2], max_tokens=5000))
    await eventually(lambda: len(reading.tokens) > 20)
    await line.cut()
    cancelling = asyncio.ensure_future(reading.stream.cancel())
    await eventually(lambda: not client.bus.connected)
    await line.mend()
    await cancelling
    await reading.end()
    assert reading.stream.status == "cancelled"
    assert reading.tokens == list(range(3, 3 + len(reading.tokens)))
    await finished(workers, worker, "cancelled")


async def test_a_cancel_that_the_worker_missed_is_found_when_it_is_back(
    server: NatsServer, line: Line, workers: Fleet
) -> None:
    worker = await workers.start("both", COUNTING, nats_url=line.url)
    async with Client.connect(server.url, timeout=None) as client:
        reading = Reading(client.tokens(MODEL, [1, 2], max_tokens=20_000))
        await eventually(lambda: len(reading.tokens) > 20)
        await line.cut()
        await eventually(lambda: workers.events(worker, "bus.disconnected"))
        await reading.stream.cancel()
        await line.mend()
        await reading.end()
    assert reading.stream.status == "cancelled"
    assert reading.tokens == list(range(3, 3 + len(reading.tokens)))


async def test_a_caller_that_does_not_come_back_has_its_request_ended(
    client: Client, workers: Fleet, line: Line
) -> None:
    soon = "from inferbus.workers.jobs import retained\nretained.AWAY = 0.5\n"
    worker = await workers.start("both", COUNTING, before=soon)
    reading = Reading(client.tokens(MODEL, [1, 2], max_tokens=20_000))
    await eventually(lambda: len(reading.tokens) > 20)
    await line.cut()
    await finished(workers, worker, "cancelled")
    await line.mend()
    # The worker says that nobody listened, or that it has forgotten the answer.
    with pytest.raises(InferbusError) as caught:
        await reading.end()
    assert caught.value.code in ("cancelled", "connection_lost")


async def test_a_worker_killed_while_its_reader_was_away_ends_the_answer_with_an_error(
    client: Client, workers: Fleet, line: Line, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live, "ASK_EVERY", 0.1)
    monkeypatch.setattr(bus, "SETTLING", 0.1)
    worker = await workers.start("both", COUNTING)
    reading = Reading(client.tokens(MODEL, [1, 2], max_tokens=COUNT))
    await eventually(lambda: len(reading.tokens) > 20)
    await line.cut()
    worker.kill()
    await worker.wait()
    await workers.start("both", COUNTING)
    await line.mend()
    with pytest.raises(ConnectionLost) as caught:
        await reading.end()
    assert caught.value.retryable
    assert reading.tokens == EXPECTED[: len(reading.tokens)]


async def test_only_who_knows_a_requests_token_is_sent_its_answer(client: Client, workers: Fleet) -> None:
    worker = await workers.start("both", COUNTING)
    stream = client.tokens(MODEL, [1, 2], max_tokens=COUNT, job_id="mine", stream=True)
    heard: list[Any] = []
    inbox = workers.bus.inbox(heard.append)
    for token in ("guessed", "", "x" * 10_000):
        fields = {"Infer-Resume": token, "Infer-From": "0"}
        workers.bus.send("infer.alive.live.mine", b"", fields, reply=inbox.subject)
    workers.bus.send("infer.alive.live.mine", b"", {}, reply=inbox.subject)
    answer = await stream
    assert isinstance(answer, TokenAnswer)
    assert answer.choices[0].token_ids == EXPECTED
    assert [message.headers for message in heard] in ([], [{"Infer-Worker": worker.name}])
    assert not any(message.data for message in heard)
    inbox.close()
