"""Batches under random kills: `make test-batches` has a hundred of them, of seeds from 0 on.

A seed decides when the submitter, all workers and the server are killed, when the queue or the results are
purged, and when a second process wants to run the same batch. Every line must be in the output once, with the
right answer, and nothing may be left on the server.
"""

from __future__ import annotations

import contextlib
import os
import random
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from inferbus.workers.batch.runs import Options, begin, run
from inferbus.workers.bus.jetstream import layout
from inferbus.workers.bus.jetstream.client import JetStream
from inferbus.workers.client import Client
from inferbus.workers.stack.processes import Child
from inferbus.workers.stack.server import NatsServer
from tests.broker.test_batch import command, left_behind
from tests.support.batches import line, read, reconcile, write
from tests.support.eventually import eventually
from tests.support.fleet import Fleet, fleet

FIRST = int(os.environ.get("BATCH_FIRST", "2"))
SEEDS = int(os.environ.get("BATCH_SEEDS", "2"))
# These two have every kind of event between them.
LINES = int(os.environ.get("BATCH_LINES", "5000"))
EVENTS = 4
WORKERS = 2
SCRIPT = "[[rules]]\ndelay = 0.1\n"


class Chaos:
    """One batch, its submitter and workers, and what may happen to them."""

    def __init__(self, server: NatsServer, workers: Fleet, client: Client, folder: Path) -> None:
        self.submitter: Child
        self.source = write(folder / "in.jsonl", [line(n) for n in range(1, LINES + 1)])
        self.output = folder / "out.jsonl"
        self.partial = folder / "out.jsonl.partial"
        self._server = server
        self._fleet = workers
        self._client = client
        self._workers: list[Child] = []
        self._commands = 0

    @property
    def events(self) -> list[Callable[[], Awaitable[None]]]:
        """All that may happen."""
        return [
            self.kill_submitter,
            self.kill_workers,
            self.kill_server,
            self.purge_queue,
            self.run_twice,
            self.purge_results,
        ]

    def written(self) -> int:
        """Lines of the output, finished or not."""
        for path in (self.partial, self.output):
            with contextlib.suppress(FileNotFoundError):
                return path.read_bytes().count(b"\n")
        return 0

    async def start(self) -> None:
        await self._start_workers()
        self.submitter = await self._run()

    async def kill_submitter(self) -> None:
        self.submitter.kill()
        await self.submitter.wait()
        self.submitter = await self._run()

    async def kill_workers(self) -> None:
        for worker in self._workers:
            worker.kill()
        await self._start_workers()

    async def kill_server(self) -> None:
        await self._server.kill()
        await self._server.restart()

    async def purge_queue(self) -> None:
        """Of what waits, and of what runs: that is answered all the same."""
        await JetStream(self._client.bus).call(f"STREAM.PURGE.{layout.JOBS}")

    async def purge_results(self) -> None:
        """Those that nobody has read are computed again."""
        await JetStream(self._client.bus).call(f"STREAM.PURGE.{layout.RESULTS}")

    async def run_twice(self) -> None:
        """A second process for the same batch, which finds the first one alive, or everything done."""
        second = await self._run()
        code = await second.wait()
        said = second.log.read_text()
        assert (code == 1 and "batch_held" in said) or (code == 0 and f"{LINES}/{LINES} done" in said), said

    async def _start_workers(self) -> None:
        self._workers = [
            await self._fleet.start("both", SCRIPT, ready=False, slots=64) for _ in range(WORKERS)
        ]
        for worker in self._workers:
            await self._fleet.ready(worker, within=30)

    async def _run(self) -> Child:
        self._commands += 1
        return await self._fleet.spawn(
            f"batch-{self._commands}", command(self.source, self.output), OWNER="me"
        )


@pytest.mark.parametrize("seed", range(FIRST, FIRST + SEEDS))
async def test_whatever_is_killed_every_line_is_answered_once(tmp_path: Path, seed: int) -> None:
    dice = random.Random(seed)
    async with (
        # It syncs, as a user's does: one that does not forgets at its death which jobs have ended.
        NatsServer(tmp_path / "nats") as server,
        fleet(server, tmp_path) as workers,
        Client.connect(server.url, owner="me") as client,
    ):
        chaos = Chaos(server, workers, client, tmp_path)
        await chaos.start()
        for point in sorted(dice.sample(range(1, LINES * 3 // 4), EVENTS)):
            await eventually(lambda point=point: chaos.written() >= point, within=60)
            await dice.choice(chaos.events)()
        await eventually(lambda: chaos.submitter.returncode is not None, within=90)
        assert chaos.submitter.returncode == 0, chaos.submitter.log.read_text()
        record = await run(client, await begin(client, chaos.source, Options(output=chaos.output)))
        assert record.counts.succeeded == LINES
        expected = [f"line-{n}" for n in range(1, LINES + 1)]
        reconcile(chaos.output, tmp_path / "out.errors.jsonl", expected)
        for each in read(chaos.output):
            number = int(each["custom_id"].removeprefix("line-"))
            assert each["response"]["body"]["choices"][0]["token_ids"] == [number + 1, number + 2]
        assert await left_behind(client) == []
