"""How an engine is asked: in small steps where somebody reads along, in large ones where nobody does."""

from __future__ import annotations

import datetime as dt
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, cast

import msgspec
import pytest

from inferbus.schemas.requests import parse
from inferbus.workers.admission import BATCH, INTERACTIVE, LIVE, Permit, ServiceClass, engine_priority
from inferbus.workers.bus.interface import Broker
from inferbus.workers.engine.interface import Leg
from inferbus.workers.engine.scripted import Script, ScriptedEngine
from inferbus.workers.jobs.attempt import Attempt
from inferbus.workers.jobs.reply import Reply, Served
from inferbus.workers.jobs.runner import Work
from inferbus.workers.pairing.legs import Alone, RunLeg, RunningLeg
from inferbus.workers.roles.answering import Answering
from inferbus.workers.roles.generation import WHOLE_STEP

NOW = dt.datetime(2026, 1, 1, tzinfo=dt.UTC)


class Nowhere:
    """Enough of a broker for chunks that nobody reads."""

    max_payload = 1 << 20
    congested = False

    def send(self, *_message: Any, **_more: Any) -> None:
        """Forgets it."""


async def asked(
    *, stream: bool, submission: int | None, permit: Permit | None = None, **body: Any
) -> list[Leg]:
    """The legs that a request became."""
    legs: list[Leg] = []
    alone = Alone(ScriptedEngine(Script()))

    def run(leg: Leg, job: str) -> AbstractAsyncContextManager[RunningLeg]:
        legs.append(leg)
        return alone(leg, job)

    await answered(run, stream=stream, submission=submission, permit=permit, **body)
    return legs


async def answered(
    run: RunLeg, *, stream: bool, submission: int | None = None, permit: Permit | None = None, **body: Any
) -> tuple[Reply, bytes]:
    """One attempt at a request; its reply, and its answer as a whole."""
    attempt = Attempt(
        job="j",
        owner="o",
        model="m",
        kind="tokens",
        number=1,
        job_class="batch" if submission else None,
        submission=submission,
        arrived=NOW,
        reply="_INBOX.a",
    )
    request = parse("tokens", {"token_ids": [1, 2], "max_tokens": 4, "stream": stream, **body})
    reply = Reply(cast(Broker, Nowhere()), attempt, Served(worker="w"))
    work = Work(attempt=attempt, request=request, reply=reply, permit=permit or Permit())
    return reply, await Answering(ScriptedEngine(Script()), run)(work)


@pytest.mark.parametrize("submission", [None, 7])
async def test_a_whole_answer_is_taken_in_large_steps(submission: int | None) -> None:
    legs = await asked(stream=False, submission=submission, n=2)
    assert [leg.sampling["stream_interval"] for leg in legs] == [WHOLE_STEP, WHOLE_STEP]


@pytest.mark.parametrize("submission", [None, 7])
async def test_an_answer_in_chunks_is_taken_as_it_comes(submission: int | None) -> None:
    legs = await asked(stream=True, submission=submission)
    assert ["stream_interval" in leg.sampling for leg in legs] == [False]


async def test_usage_counts_what_the_prefill_worker_had_cached_and_the_end_mark_names_it() -> None:
    alone = Alone(ScriptedEngine(Script()))

    @asynccontextmanager
    async def paired(leg: Leg, job: str) -> AsyncIterator[RunningLeg]:
        async with alone(leg, job) as running:
            yield msgspec.structs.replace(running, prefill="p1", cached_tokens=1)

    reply, body = await answered(paired, stream=False)
    assert msgspec.json.decode(body)["usage"]["prompt_tokens_details"] == {"cached_tokens": 1}
    assert reply.served.prefill == "p1"


@pytest.mark.parametrize("service_class", [LIVE, INTERACTIVE, BATCH])
async def test_the_engine_is_asked_with_the_priority_of_the_class(service_class: ServiceClass) -> None:
    legs = await asked(stream=True, submission=7, permit=Permit(service_class), n=2)
    assert [leg.options["priority"] for leg in legs] == [engine_priority(service_class, None)] * 2
