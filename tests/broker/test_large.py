"""Jobs and answers that are larger than a NATS message may be."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from inferbus.schemas.answers import TokenAnswer
from inferbus.workers.bus.jetstream import layout
from inferbus.workers.bus.jetstream.client import JetStream
from inferbus.workers.client import Client
from inferbus.workers.stack.server import NatsServer
from tests.support.eventually import eventually
from tests.support.fleet import MODEL, fleet

SCRIPT = "context_length = 900000\nburst = 4096\n[[rules]]\nlength = 200000\n"
LIMIT = 1024 * 1024


@pytest.fixture
async def client(server: NatsServer, tmp_path: Path) -> AsyncIterator[Client]:
    """Of a server with the default payload limit, and a worker."""
    async with fleet(server, tmp_path) as workers:
        await workers.start("both", SCRIPT)
        async with Client.connect(server.url, owner="acme") as client:
            yield client


async def objects(client: Client) -> int:
    return len(await JetStream(client.bus).read(layout.OBJECTS, client.bus.subjects.all("objects")))


async def test_a_job_over_the_payload_limit_is_answered_and_leaves_nothing(client: Client) -> None:
    tokens = [32_000] * 400_000
    job = await client.submit("tokens", MODEL, {"token_ids": tokens, "max_tokens": 3})
    assert await objects(client) > 1
    result = await client.result(job, timeout=30)
    assert isinstance(result.answer, TokenAnswer)
    assert result.answer.usage is not None
    assert result.answer.usage.prompt_tokens == len(tokens)

    async def gone() -> bool:
        return await objects(client) == 0

    await eventually(gone)


@pytest.mark.parametrize("stream", [True, False])
async def test_an_answer_over_the_payload_limit_is_whole_in_its_stream_and_its_result(
    client: Client, stream: bool
) -> None:
    job = await client.submit("tokens", MODEL, {"token_ids": [1], "max_tokens": 200_000}, stream=stream)
    result = await client.result(job, timeout=60)
    assert isinstance(result.answer, TokenAnswer)
    assert len(result.answer.choices[0].token_ids) == 200_000
    streamed = [token async for chunk in client.stream(job) for token in chunk.token_ids]  # type: ignore[union-attr]
    assert streamed == result.answer.choices[0].token_ids
    stored = await JetStream(client.bus).last(layout.RESULTS, client.bus.subjects.result("acme", job.id))
    assert stored is not None
    assert len(stored.data) < LIMIT


async def test_a_repeated_submission_over_the_payload_limit_is_the_same_job(client: Client) -> None:
    body = {"token_ids": [32_000] * 300_000, "max_tokens": 3}
    first = await client.submit("tokens", MODEL, body, job_id="large")
    second = await client.submit("tokens", MODEL, body, job_id="large")
    assert (second.duplicate, second.submission) == (True, first.submission)
    assert (await client.result(first, timeout=30)).status == "ok"
