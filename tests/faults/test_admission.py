"""What a worker takes of a long queue, and what it leaves there for others."""

from __future__ import annotations

import json
import signal
from collections import Counter
from collections.abc import AsyncIterator

import nats
import pytest
from nats.aio.client import Client

from inferbus.workers.stack.server import NatsServer
from tests.support.asking import Answer, result
from tests.support.eventually import eventually
from tests.support.fleet import Fleet

pytestmark = pytest.mark.faults

JOBS = "infer.jobs.scripted.batch.acme.tokens"
PROMPT = list(range(1, 17))
WINDOW = 4 * len(PROMPT)
NO_FIRST_TOKEN = "[[rules]]\nfirst_token = 1\nfirst_delay = 60\n[[rules]]\nlength = 2\n"
"""Prompts that begin with 1 are computed for ever, as far as a test can tell."""

HELD_AT_MOST = 8
"""Jobs: four in the engine, the one that waits behind them, and those that were on their way."""


@pytest.fixture
async def nc(server: NatsServer) -> AsyncIterator[Client]:
    client = await nats.connect(server.url)
    yield client
    await client.close()


async def submit(nc: Client, count: int) -> None:
    body = json.dumps({"token_ids": PROMPT}).encode()
    for number in range(count):
        await nc.jetstream().publish(JOBS, body, headers={"Nats-Msg-Id": f"j{number}"})


async def held(nc: Client) -> int:
    """Jobs that were delivered and are not acknowledged."""
    consumers = await nc.jetstream().consumers_info("INFER_JOBS")
    return sum(info.num_ack_pending or 0 for info in consumers)


async def test_jobs_that_the_engine_cannot_start_stay_in_their_queue(nc: Client, workers: Fleet) -> None:
    await workers.start("both", NO_FIRST_TOKEN, prompt_window=WINDOW)
    await submit(nc, 50)
    await eventually(lambda: workers.roster.workers()[0].load.queued)
    assert 4 <= await held(nc) <= HELD_AT_MOST


async def test_a_live_request_is_answered_while_jobs_wait_for_the_engine(nc: Client, workers: Fleet) -> None:
    await workers.start("both", NO_FIRST_TOKEN, prompt_window=WINDOW)
    await submit(nc, 50)
    await eventually(lambda: workers.roster.workers()[0].load.queued)
    answer = await Answer.on(nc, nc.new_inbox())
    await nc.publish("infer.request.scripted.tokens", b'{"token_ids":[2]}', reply=answer.subject)
    assert await answer.ended() == "ok"


async def test_a_killed_worker_costs_only_the_jobs_that_it_had_an_attempt(nc: Client, workers: Fleet) -> None:
    worker = await workers.start("both", NO_FIRST_TOKEN, prompt_window=WINDOW, ack_wait=1)
    await submit(nc, 50)
    await eventually(lambda: workers.roster.workers()[0].load.queued)
    worker.send_signal(signal.SIGKILL)
    await worker.wait()
    await workers.start("both", "[[rules]]\nlength = 2\n", ack_wait=1)
    results = [await result(nc, f"j{number}") for number in range(50)]
    assert {each.headers["Infer-Status"] for each in results} == {"ok"}
    again = [each for each in results if each.headers["Infer-Attempt"] != "1"]
    assert 4 <= len(again) <= HELD_AT_MOST


async def test_a_worker_that_starts_beside_a_long_queue_does_its_share_of_it(
    nc: Client, workers: Fleet
) -> None:
    quick = "[[rules]]\nlength = 5\ndelay = 0.02\n"
    await workers.start("both", quick, slots=4)
    await submit(nc, 200)
    await workers.start("both", quick, slots=4)
    begun = (await nc.jetstream().stream_info("INFER_JOBS")).state.messages
    results = [await result(nc, f"j{number}") for number in range(200)]
    later = Counter(each.headers["Infer-Worker"] for each in results[-begun:])
    assert len(later) == 2
    assert min(later.values()) >= 0.4 * begun
