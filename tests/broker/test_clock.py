"""Deadlines at a worker whose clock is wrong, over a real server."""

from __future__ import annotations

import datetime as dt
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Final

import pytest

from inferbus.schemas.errors import DeadlineExceeded
from inferbus.workers.bus.connection.bus import Bus
from inferbus.workers.bus.jetstream.clock import following
from inferbus.workers.client import Client
from inferbus.workers.stack.server import NatsServer
from tests.support.fleet import MODEL, Fleet, fleet

WRONG: Final = """
import datetime, os, sys, types
from pathlib import Path
from inferbus.workers.config import resolve
from inferbus.workers.roles import run

class Wrong(datetime.datetime):
    @classmethod
    def now(cls, tz=None):
        return datetime.datetime.now(tz) + datetime.timedelta(seconds=float(sys.argv[1]))

wrong = types.SimpleNamespace(**vars(datetime) | {"datetime": Wrong})
for name, module in list(sys.modules.items()):
    if name.startswith("inferbus.workers.") and hasattr(module, "dt"):
        module.dt = wrong
sys.exit(run("both", resolve({}, os.environ), scripted=Path(sys.argv[2])))
"""
"""A worker, as on a machine whose clock is wrong."""

SCRIPT: Final = """
[[rules]]
user = "endless"
length = 1000
delay = 0.1
"""


@pytest.fixture
async def workers(server: NatsServer, tmp_path: Path) -> AsyncIterator[Fleet]:
    async with fleet(server, tmp_path) as found:
        yield found


@pytest.mark.parametrize("ahead", [75, -75])
async def test_jobs_and_requests_end_at_their_deadlines_whatever_the_workers_clock_says(
    server: NatsServer, workers: Fleet, tmp_path: Path, ahead: int
) -> None:
    script = tmp_path / "script.toml"
    script.write_text(SCRIPT)
    worker = await workers.spawn("wrong", [sys.executable, "-c", WRONG, str(ahead), str(script)])
    await workers.ready(worker, within=30)
    (told,) = workers.events(worker, "clock.skewed")
    assert told["ahead"] == pytest.approx(ahead, abs=1)
    body = {"token_ids": [1], "max_tokens": 3}
    endless = {"token_ids": [1], "max_tokens": 1000, "user": "endless"}
    in_a_minute = dt.datetime.now(dt.UTC) + dt.timedelta(seconds=60)
    async with Client.connect(server.url, owner="acme") as client:
        for deadline in (60, in_a_minute):
            job = await client.submit("tokens", MODEL, body, deadline=deadline)
            assert (await client.result(job, timeout=20)).status == "ok"
            assert await client.tokens(MODEL, [1], max_tokens=3, deadline=deadline).answer()
        job = await client.submit("tokens", MODEL, endless, deadline=1)
        with pytest.raises(DeadlineExceeded):
            await client.result(job, timeout=20)
        soon = dt.datetime.now(dt.UTC) + dt.timedelta(seconds=1)
        with pytest.raises(DeadlineExceeded):
            await client.tokens(MODEL, [1], max_tokens=1000, user="endless", deadline=soon).answer()


async def test_the_servers_clock_is_this_machines_where_both_are_one(streams: Bus) -> None:
    async with following(streams) as clock:
        assert abs(clock.skew) < 1
        assert abs((clock.now() - dt.datetime.now(dt.UTC)).total_seconds()) < 1
