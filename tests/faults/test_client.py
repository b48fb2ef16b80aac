"""What a user of the client sees when workers and the server die under a job: nothing."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from inferbus.schemas.answers import TokenAnswer, TokenChunk
from inferbus.schemas.errors import Cancelled
from inferbus.workers.bus.jetstream import layout
from inferbus.workers.client import Client, JobStream, Restarted, WorkerLost, live, text
from inferbus.workers.stack.server import NatsServer
from tests.support.eventually import eventually
from tests.support.fleet import Fleet

pytestmark = pytest.mark.faults

SLOW = "[[rules]]\nlength = 1000\ndelay = 0.03\n"
BODY: dict[str, Any] = {"token_ids": [1, 2], "max_tokens": 60}
SENTENCE = "A sentence that is long enough for a worker to die in the middle of it."
TALKING = f'tokenizer = true\n[[rules]]\ntext = "{SENTENCE}"\ncontinues = true\ndelay = 0.03\n'
EXPECTED = list(range(3, 63))


async def follow(stream: JobStream, seen: list[int], events: list[Any]) -> None:
    async for event in stream:
        events.append(event)
        if isinstance(event, TokenChunk):
            seen.extend(event.token_ids)


async def test_a_killed_worker_is_replaced_without_a_trace(client: Client, workers: Fleet) -> None:
    first = await workers.start("both", SLOW)
    job = await client.submit("tokens", "scripted", BODY)
    seen: list[int] = []
    events: list[Any] = []
    reading = asyncio.create_task(follow(client.stream(job), seen, events))
    await eventually(lambda: len(seen) > 5)
    first.kill()
    await workers.start("both", SLOW)
    async with asyncio.timeout(30):
        await reading
        result = await client.result(job)
    assert seen == EXPECTED
    assert not any(isinstance(event, Restarted) for event in events)
    assert [event.seq for event in events] == list(range(len(events)))
    assert isinstance(result.answer, TokenAnswer)
    assert result.answer.choices[0].token_ids == EXPECTED
    assert result.attempt == 2


async def test_a_killed_worker_is_replaced_in_mid_sentence(client: Client, workers: Fleet) -> None:
    first = await workers.start("both", TALKING)
    job = await client.submit("chat", "scripted", {"messages": [{"role": "user", "content": "Tell me."}]})
    stream, seen = client.stream(job), list[str]()
    events: list[Any] = []

    async def listen() -> None:
        async for event in stream:
            events.append(event)
            seen.append(text(event))

    reading = asyncio.create_task(listen())
    await eventually(lambda: len("".join(seen)) > 10)
    first.kill()
    await workers.start("both", TALKING)
    async with asyncio.timeout(30):
        await reading
        result = await client.result(job)
    assert "".join(seen) == SENTENCE
    assert not any(isinstance(event, Restarted) for event in events)
    choices = [choice for event in events for choice in event["choices"]]
    assert sum("role" in choice["delta"] for choice in choices) == 1
    assert sum(choice["finish_reason"] is not None for choice in choices) == 1
    answer = await stream.answer()
    assert isinstance(answer, dict)
    assert isinstance(result.answer, dict)
    assert answer["choices"][0]["message"] == result.answer["choices"][0]["message"]
    assert answer["usage"]["completion_tokens"] == len(SENTENCE)
    assert answer["usage"] == result.answer["usage"]
    assert any(warning.startswith("continued after") for warning in stream.warnings)


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "ASK_AFTER", 0.3)
    monkeypatch.setattr(live, "ASK_EVERY", 0.2)


@pytest.mark.usefixtures("impatient")
async def test_a_live_request_whose_worker_is_killed_ends_with_an_error_that_says_so(
    client: Client, workers: Fleet
) -> None:
    first = await workers.start("both", SLOW)
    stream, seen = client.tokens("scripted", BODY["token_ids"], max_tokens=60), list[int]()

    async def listen() -> None:
        async for chunk in stream:
            seen.extend(chunk.token_ids)

    reading = asyncio.create_task(listen())
    await eventually(lambda: len(seen) > 5)
    first.kill()
    await workers.start("both", SLOW)
    with pytest.raises(WorkerLost) as caught:
        async with asyncio.timeout(30):
            await reading
    assert caught.value.retryable
    assert seen == EXPECTED[: len(seen)]


async def test_a_slow_worker_is_not_taken_for_a_dead_one(
    client: Client, workers: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live, "ASK_AFTER", 0.3)
    monkeypatch.setattr(live, "ASK_EVERY", 0.5)
    await workers.start("both", "[[rules]]\nlength = 2\ndelay = 5\n")
    async with asyncio.timeout(30):
        answer = await client.tokens("scripted", [1, 2], max_tokens=2).answer()
    assert isinstance(answer, TokenAnswer)
    assert len(answer.choices[0].token_ids) == 2


async def test_a_job_that_is_submitted_once_more_after_its_server_died_does_not_run_again(
    client: Client, workers: Fleet, server: NatsServer
) -> None:
    worker = await workers.start("both", "[[rules]]\nlength = 3\n")
    job = await client.submit("tokens", "scripted", BODY, job_id="mine")
    first = await client.result(job)

    async def ended() -> bool:
        return bool((await client.bus.js.stream_info(layout.JOBS)).state.messages == 0)

    await eventually(ended)
    await server.kill()
    await server.restart()
    again = await client.submit("tokens", "scripted", BODY, job_id="mine")
    second = await client.result(again, timeout=30)
    assert second.answer == first.answer
    assert await client.stream(again).answer() == first.answer
    assert len(workers.events(worker, "job.started")) == 1


async def test_a_server_that_dies_for_a_moment_costs_nothing(
    client: Client, workers: Fleet, server: NatsServer
) -> None:
    await workers.start("both", SLOW)
    job = await client.submit("tokens", "scripted", BODY)
    seen: list[int] = []
    events: list[Any] = []
    reading = asyncio.create_task(follow(client.stream(job), seen, events))
    await eventually(lambda: len(seen) > 5)
    await server.kill()
    await server.restart()
    async with asyncio.timeout(60):
        await reading
    assert seen == EXPECTED
    assert not any(isinstance(event, Restarted) for event in events)


async def test_a_cancel_that_travels_with_its_request_stops_it(client: Client, workers: Fleet) -> None:
    worker = await workers.start("both", "[[rules]]\nlength = 30000\ndelay = 0.01\n")
    for _ in range(40):
        stream = client.tokens("scripted", [1, 2])
        await stream.cancel()
        with pytest.raises(Cancelled):
            await stream.answer()
    await workers.idle()
    assert len(workers.events(worker, "request.finished")) == 40
