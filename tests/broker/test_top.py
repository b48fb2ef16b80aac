"""`inferbus top` beside a fleet of scripted workers."""

from __future__ import annotations

import asyncio
import json
import os
import pty
import signal
import sys
from pathlib import Path

import pytest

from inferbus.workers.batch.runs import Options, begin
from inferbus.workers.cli import main
from inferbus.workers.client import Client
from inferbus.workers.stack.server import NatsServer
from inferbus.workers.top import Collector
from tests.support.batches import line, write
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


async def test_a_batch_that_runs_is_shown_and_the_view_outlives_the_server(
    server: NatsServer, tmp_path: Path
) -> None:
    async with fleet(server, tmp_path) as found, Client.connect(server.url) as client:
        await found.start("both", slots=1)
        source = write(tmp_path / "in.jsonl", [line(n) for n in range(1, 4)])
        batch = (await begin(client, source, Options())).kept.record
        (shown,) = (await Collector(client).snapshot()).batches
        assert (shown.id, shown.lines) == (batch.id, 3)
        screen, terminal = pty.openpty()
        program = [sys.executable, "-m", "inferbus.workers.cli", "top", "--interval", "1"]
        child = await asyncio.create_subprocess_exec(
            *program, "--nats-url", server.url, stdin=terminal, stdout=terminal, stderr=terminal
        )
        os.close(terminal)
        seen = bytearray()

        async def until(*texts: str) -> None:
            async with asyncio.timeout(60):
                while not any(text.encode() in seen for text in texts):
                    seen.extend(await asyncio.to_thread(os.read, screen, 65536))

        await until(batch.id)
        await server.kill()
        seen.clear()
        await until("not answered", "not connected")
        await server.restart()
        seen.clear()
        await until(batch.id)
        child.send_signal(signal.SIGINT)
        reading = asyncio.create_task(until("nothing like this"))
        assert await child.wait() in (0, 130)
        with pytest.raises(OSError, match="Input/output error"):
            await reading
        os.close(screen)
