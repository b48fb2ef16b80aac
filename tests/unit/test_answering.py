"""How an engine is asked: in small steps where somebody reads along, in large ones where nobody does."""

from __future__ import annotations

import datetime as dt
from collections.abc import AsyncGenerator
from typing import Any, cast

import pytest

from inferbus.schemas.requests import parse
from inferbus.workers.bus.interface import Broker
from inferbus.workers.engine.interface import Delta, Leg
from inferbus.workers.engine.scripted import Script, ScriptedEngine
from inferbus.workers.jobs.attempt import Work
from inferbus.workers.jobs.job import Job
from inferbus.workers.jobs.reply import Reply, Served
from inferbus.workers.pairing.legs import Alone
from inferbus.workers.roles.answering import WHOLE_STEP, Answering

NOW = dt.datetime(2026, 1, 1, tzinfo=dt.UTC)


class Nowhere:
    """Enough of a broker for chunks that nobody reads."""

    max_payload = 1 << 20
    congested = False

    def send(self, *_message: Any, **_more: Any) -> None:
        """Forgets it."""


async def asked(*, stream: bool, submission: int | None, **body: Any) -> list[Leg]:
    """The legs that a request became."""
    legs: list[Leg] = []
    alone = Alone(ScriptedEngine(Script()))

    def run(leg: Leg, job: str, served: Served) -> AsyncGenerator[Delta, None]:
        legs.append(leg)
        return alone(leg, job, served)

    job = Job(
        id="j",
        owner="o",
        model="m",
        kind="tokens",
        attempt=1,
        job_class="batch" if submission else None,
        submission=submission,
        arrived=NOW,
        reply="_INBOX.a",
    )
    request = parse("tokens", {"token_ids": [1, 2], "max_tokens": 4, "stream": stream, **body})
    served = Served(worker="w")
    reply = Reply(cast(Broker, Nowhere()), job, served)
    await Answering(ScriptedEngine(Script()), run)(Work(job=job, request=request, reply=reply, served=served))
    return legs


@pytest.mark.parametrize("submission", [None, 7])
async def test_a_whole_answer_is_taken_in_large_steps(submission: int | None) -> None:
    legs = await asked(stream=False, submission=submission, n=2)
    assert [leg.sampling["stream_interval"] for leg in legs] == [WHOLE_STEP, WHOLE_STEP]


@pytest.mark.parametrize("submission", [None, 7])
async def test_an_answer_in_chunks_is_taken_as_it_comes(submission: int | None) -> None:
    legs = await asked(stream=True, submission=submission)
    assert ["stream_interval" in leg.sampling for leg in legs] == [False]
