"""Batches under random kills, on demand: `BATCH_SEEDS=100 pytest tests/broker/test_batch_random.py`.

A seed decides when the submitter, the workers and the server are killed. Every line must be in the output
once, with the right answer, and nothing may be left on the server.
"""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from inferbus.workers.batch.runs import Options, begin, run
from inferbus.workers.client import Client
from inferbus.workers.stack.server import NatsServer
from tests.broker.test_batch import command, left_behind, until_written
from tests.support.batches import line, read, reconcile, write
from tests.support.eventually import eventually
from tests.support.fleet import fleet

SEEDS = int(os.environ.get("BATCH_SEEDS", "1"))
LINES = int(os.environ.get("BATCH_LINES", "600"))
SCRIPT = "[[rules]]\ndelay = 0.05\n"


@pytest.mark.parametrize("seed", range(SEEDS))
async def test_whatever_is_killed_every_line_is_answered_once(
    server: NatsServer, tmp_path: Path, seed: int
) -> None:
    dice = random.Random(seed)
    output = tmp_path / "out.jsonl"
    partial = tmp_path / "out.jsonl.partial"
    source = write(tmp_path / "in.jsonl", [line(n) for n in range(1, LINES + 1)])
    async with fleet(server, tmp_path) as workers, Client.connect(server.url, owner="me") as client:
        worker = await workers.start("both", SCRIPT, slots=32)
        child = await workers.spawn("batch-0", command(source, output), OWNER="me")
        points = sorted(dice.sample(range(1, LINES // 2), 3))
        for number, point in enumerate(points, 1):
            await until_written(partial, point)
            what = dice.choice(("submitter", "worker", "server"))
            if what == "submitter":
                child.kill()
                await child.wait()
                child = await workers.spawn(f"batch-{number}", command(source, output), OWNER="me")
            elif what == "worker":
                worker.kill()
                worker = await workers.start("both", SCRIPT, slots=32)
            else:
                await server.kill()
                await server.restart()
        await eventually(lambda: child.returncode is not None, within=90)
        assert child.returncode == 0, child.log.read_text()
        record = await run(client, await begin(client, source, Options(output=output)))
        assert record.counts.succeeded == LINES
        reconcile(output, tmp_path / "out.errors.jsonl", [f"line-{n}" for n in range(1, LINES + 1)])
        for each in read(output):
            number = int(each["custom_id"].removeprefix("line-"))
            assert each["response"]["body"]["choices"][0]["token_ids"] == [number + 1, number + 2]
        # A worker that is killed, or without its server, just as a job ends leaves a count, which expires.
        assert [each for each in await left_behind(client) if ".attempts." not in each] == []
