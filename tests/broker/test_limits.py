"""Workers of one name with different limits: a request goes to one that can serve it."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from inferbus.schemas.errors import ContextLengthExceeded
from inferbus.workers.client import Client, WorkerLost, live
from inferbus.workers.stack.server import NatsServer
from tests.support.eventually import eventually
from tests.support.fleet import MODEL, Fleet, fleet

SMALL = "context_length = 128\n"
LARGE = "context_length = 4096\n"
SLOW = "[[rules]]\ndelay = 0.2\n"
LONG = [1] * 200
HELLO = [{"role": "user", "content": "Hello"}]
REQUESTS = 12


@pytest.fixture
async def workers(tmp_path: Path) -> AsyncIterator[tuple[Fleet, Client]]:
    """A fleet without workers, and a client of it."""
    async with (
        NatsServer(tmp_path / "nats", sync_interval=None) as server,
        fleet(server, tmp_path) as found,
        Client.connect(server.url, owner="acme", timeout=20) as client,
    ):
        yield found, client


async def test_a_request_goes_to_the_worker_whose_context_it_fits(workers: tuple[Fleet, Client]) -> None:
    found, client = workers
    small = await found.start("both", SMALL, slots=32)
    large = await found.start("both", LARGE, slots=32)
    for stream in (False, True):
        asked = [client.tokens(MODEL, LONG, stream=stream, max_tokens=8) for _ in range(REQUESTS)]
        await asyncio.gather(*(each.answer() for each in asked))
        assert {each.worker for each in asked} == {large.name}
    assert found.events(small, "request.passed_on")


async def test_a_request_whose_second_worker_dies_ends_with_an_error_that_says_so(
    workers: tuple[Fleet, Client], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live, "ASK_AFTER", 0.3)
    monkeypatch.setattr(live, "ASK_EVERY", 0.2)
    found, client = workers
    small = await found.start("both", SMALL, slots=32)
    large = await found.start("both", LARGE, slots=32)
    large.send_signal(signal.SIGSTOP)
    asked = [client.tokens(MODEL, LONG, max_tokens=8) for _ in range(REQUESTS)]
    await eventually(lambda: bool(found.events(small, "request.passed_on")), within=30)
    large.kill()
    for ended in await asyncio.gather(*(each.answer() for each in asked), return_exceptions=True):
        assert isinstance(ended, WorkerLost)
        assert ended.retryable


@pytest.mark.parametrize("attempts", [1, 5])
async def test_a_job_goes_to_the_worker_whose_context_it_fits(
    workers: tuple[Fleet, Client], attempts: int
) -> None:
    found, client = workers
    small = await found.start("both", SMALL, max_attempts=attempts)
    large = await found.start("both", LARGE, max_attempts=attempts)
    body = {"token_ids": LONG, "max_tokens": 8}
    jobs = [await client.submit("tokens", MODEL, body) for _ in range(REQUESTS)]
    results = [await client.result(job, timeout=60) for job in jobs]
    assert {(result.status, result.worker) for result in results} == {("ok", large.name)}
    assert found.events(small, "job.handed_back")
    assert not found.events(small, "job.dead")


async def test_a_job_waits_for_the_worker_that_it_fits_however_often_the_other_one_takes_it(
    workers: tuple[Fleet, Client],
) -> None:
    found, client = workers
    small = await found.start("both", SMALL, max_attempts=2)
    large = await found.start("both", LARGE + SLOW, slots=1, max_attempts=2)
    first = await client.submit("tokens", MODEL, {"token_ids": LONG, "max_tokens": 40})
    await eventually(lambda: bool(found.events(large, "job.started")), within=30)
    second = await client.submit("tokens", MODEL, {"token_ids": LONG, "max_tokens": 8})
    for job in (first, second):
        result = await client.result(job, timeout=60)
        assert (result.status, result.worker) == ("ok", large.name)
    assert len(found.events(small, "job.handed_back")) > 2


async def test_a_kind_that_a_worker_lacks_goes_to_one_that_has_it(workers: tuple[Fleet, Client]) -> None:
    found, client = workers
    await found.start("both", "tokenizer = false\n", slots=32)
    large = await found.start("both", "tokenizer = true\n", slots=32)
    asked = [client.chat(MODEL, HELLO, max_tokens=8) for _ in range(REQUESTS)]
    await asyncio.gather(*(each.answer() for each in asked))
    assert {each.worker for each in asked} == {large.name}


async def test_what_fits_no_worker_is_the_callers_mistake(workers: tuple[Fleet, Client]) -> None:
    found, client = workers
    await found.start("both", SMALL)
    await found.start("both", LARGE)
    for _ in range(REQUESTS):
        with pytest.raises(ContextLengthExceeded):
            await client.tokens(MODEL, [1] * 5000).answer()
    job = await client.submit("tokens", MODEL, {"token_ids": [1] * 5000})
    with pytest.raises(ContextLengthExceeded):
        await client.result(job, timeout=30)
