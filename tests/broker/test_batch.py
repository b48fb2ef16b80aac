"""Whole batches: a real server, real worker processes with scripted engines, and whatever dies meanwhile."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from inferbus.workers.batch.runs import Options, begin, run
from inferbus.workers.client import Client
from inferbus.workers.stack.server import NatsServer
from tests.support.batches import line, read, reconcile, write
from tests.support.fleet import Fleet, fleet


@pytest.fixture
async def workers(server: NatsServer, tmp_path: Path) -> AsyncIterator[Fleet]:
    async with fleet(server, tmp_path) as found:
        yield found


@pytest.fixture
async def client(server: NatsServer) -> AsyncIterator[Client]:
    async with Client.connect(server.url, owner="me") as found:
        yield found


async def test_every_line_is_answered_once(workers: Fleet, client: Client, tmp_path: Path) -> None:
    await workers.start(slots=64)
    source = write(tmp_path / "in.jsonl", [line(n) for n in range(1, 501)])
    record = await run(client, await begin(client, source, Options()))
    assert record.status == "completed"
    assert record.counts.succeeded == record.source.lines == 500
    reconcile(
        tmp_path / "in.output.jsonl", tmp_path / "in.errors.jsonl", [f"line-{n}" for n in range(1, 501)]
    )
    assert not (tmp_path / "in.errors.jsonl").exists()
    for each in read(tmp_path / "in.output.jsonl"):
        number = int(each["custom_id"].removeprefix("line-"))
        assert each["response"]["status_code"] == 200
        assert each["error"] is None
        assert each["response"]["body"]["choices"][0]["token_ids"] == [number + 1, number + 2]
