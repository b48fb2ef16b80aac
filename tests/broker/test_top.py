"""`inferbus top` beside a fleet of scripted workers."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from inferbus.workers.cli import main
from inferbus.workers.client import Client
from inferbus.workers.stack.server import NatsServer
from inferbus.workers.top import Collector
from tests.support.eventually import eventually
from tests.support.fleet import MODEL, fleet

SLOW = "[[rules]]\nlength = 1000\ndelay = 0.05"


async def test_a_fleet_s_workers_queues_and_rates_are_read(
    server: NatsServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with fleet(server, tmp_path) as found, Client.connect(server.url) as client:
        await found.start("both", slots=1)
        collector = Collector(client)
        first = await collector.snapshot()
        assert (first.hidden, first.troubles, first.dead, first.rates) == ([], [], 0, {})
        await client.tokens("scripted", [1, 2], max_tokens=4).answer()
        job = await client.submit("tokens", MODEL, {"token_ids": [1]})
        await client.result(job)
        second = await collector.snapshot()
        (rate,) = second.rates.values()
        assert rate.requests > 0
        assert rate.errors == 0
        assert rate.latency is not None
        (worker,) = second.ended
        assert second.ended[worker].requests == 2
        assert {each.job_class for each in second.queues} == {"interactive", "batch"}
        code = await asyncio.to_thread(
            main, ["top", "--once", "--json", "--interval", "1", "--nats-url", server.url]
        )
        assert code == 0
        told = json.loads(capsys.readouterr().out.splitlines()[-1])
        assert [each["state"] for each in told["workers"]] == ["ready"]


async def test_jobs_that_wait_are_told_with_the_age_of_the_oldest(
    server: NatsServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with fleet(server, tmp_path) as found, Client.connect(server.url) as client:
        await found.start("both", SLOW, slots=1)
        jobs = [await client.submit("tokens", MODEL, {"token_ids": [1]}) for _ in range(3)]

        async def waiting() -> bool:
            (queue,) = [
                each for each in (await Collector(client).snapshot()).queues if each.oldest is not None
            ]
            return (queue.pending, queue.taken) == (2, 1)

        await eventually(waiting, what="one job runs and two wait")
        code = await asyncio.to_thread(main, ["top", "--once", "--interval", "1", "--nats-url", server.url])
        assert code == 0
        lines = [line.split() for line in capsys.readouterr().out.splitlines()]
        (row,) = [line for line in lines if line[:2] == [MODEL, "batch"]]
        assert row[2:4] == ["2", "1"]
        for job in jobs:
            await client.cancel(job)
