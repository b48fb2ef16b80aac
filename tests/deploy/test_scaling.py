"""Scaling by the queue: what KEDA reads of a real server, and what it and Kubernetes decide from that."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from inferbus.schemas.errors import BusUnavailable
from inferbus.schemas.subjects import CLASSES, JobClass
from inferbus.workers.bus.connection.bus import Bus
from inferbus.workers.bus.jetstream import layout
from inferbus.workers.bus.jetstream.client import JetStream
from inferbus.workers.client import Client
from inferbus.workers.client.operator import Operator
from inferbus.workers.config import BusSettings, Settings, StreamSettings, WorkerSettings
from inferbus.workers.stack.server import NatsServer
from tests.support.cluster import cluster, elected
from tests.support.eventually import eventually
from tests.support.fleet import MODEL, fleet
from tests.support.keda import Autoscaler, Fetch, Trigger, TriggerError, fetched
from tests.support.kubectl import combined

KUBERNETES = Path(__file__).parents[2] / "deploy" / "kubernetes"
BODY = {"token_ids": [1, 2], "max_tokens": 3}
SLOTS = 64
PERIOD = 15


@pytest.fixture(scope="module")
def specs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """The ScaledObjects of both roles as kubectl builds them, for the model of the tests."""
    model = [{"name": "inferbus", "behavior": "merge", "literals": [f"INFERBUS_SERVED_MODEL={MODEL}"]}]
    built = combined(
        tmp_path_factory.mktemp("scaled"),
        [KUBERNETES / "overlays" / "cpu"],
        [KUBERNETES / "components" / "scaling"],
        configMapGenerator=model,
    )
    return {each["metadata"]["name"]: each["spec"] for each in built if each["kind"] == "ScaledObject"}


def triggers(spec: dict[str, Any], fetch: Fetch) -> dict[str, Trigger]:
    return {
        each["name"]: Trigger(each["metadata"], fetch)
        for each in spec["triggers"]
        if each["type"] == "nats-jetstream"
    }


async def test_the_lag_follows_the_queue_from_nothing_to_many_jobs_and_back(
    tmp_path: Path, specs: dict[str, dict[str, Any]]
) -> None:
    async with (
        NatsServer(tmp_path / "nats", sync_interval=None, monitoring=True) as server,
        Client.connect(server.url, owner="acme") as client,
    ):
        address = server.monitoring_url.removeprefix("http://")
        read = triggers(specs["decode"], lambda _, path: fetched(address, path))
        scaler = Autoscaler(specs["decode"])

        async def lags() -> dict[str, int]:
            return {name: await trigger.lag() for name, trigger in read.items()}

        # Without the consumers there is no value, and nothing ever starts: hence the Job `init`.
        with pytest.raises(TriggerError, match="not found"):
            await lags()
        await Operator(client.bus).init(MODEL, Settings())
        assert await lags() == {"interactive": 0, "batch": 0}
        assert scaler.decide(0, await lags()) == 0

        await client.submit("tokens", MODEL, BODY, job_class="interactive")
        assert await lags() == {"interactive": 1, "batch": 0}
        assert scaler.decide(PERIOD, await lags()) == 1

        jobs = [await client.submit("tokens", MODEL, BODY, job_class="batch") for _ in range(12)]
        assert await lags() == {"interactive": 1, "batch": 12}
        # 193 lines, as far as anybody can tell from 13 messages, for workers with 64 slots.
        assert scaler.decide(2 * PERIOD, await lags()) == 4

        async with fleet(server, tmp_path) as workers:
            # What a worker has taken and not finished counts as well.
            await workers.start("both", "[[rules]]\nlength = 3\ndelay = 0.02\n", slots=4)
            for job in jobs:
                await client.result(job, timeout=30)

            async def done() -> bool:
                return await lags() == {"interactive": 0, "batch": 0}

            await eventually(done)


async def test_the_lag_is_that_of_the_consumers_leader_whichever_server_is_asked(
    tmp_path: Path, specs: dict[str, dict[str, Any]]
) -> None:
    async with cluster(tmp_path, monitoring=True) as servers:
        addresses = {f"n{i}": each.monitoring_url.removeprefix("http://") for i, each in enumerate(servers)}
        urls = tuple(each.url for each in servers)
        bus = await Bus.connect(BusSettings(urls=urls, connect_timeout=2.0), name="test")
        try:
            await elected(bus)
            settings = Settings(streams=StreamSettings(replicas=3), worker=WorkerSettings(worker="w"))

            async def made() -> bool:
                # A stream that is being placed has no leader yet.
                try:
                    await Operator(bus).init(MODEL, settings)
                except BusUnavailable:
                    return False
                return True

            await eventually(made, within=30)
            jetstream = JetStream(bus)
            async with Client.connect(urls, owner="acme") as client:
                for _ in range(5):
                    await client.submit("tokens", MODEL, BODY, job_class="batch")
            consumer = f"{layout.JOBS}.{layout.durable(MODEL, 'batch')}"
            for asked in addresses:

                def fetch(host: str, path: str, first: str = asked) -> dict[str, Any]:
                    """The headless service's name leads to any server, a server's own to that server."""
                    node = host.split(".")[0]
                    answer = fetched(addresses.get(node, addresses[first]), path)
                    if path == "/varz":
                        # Routes lead to names in Kubernetes, and here to ports of one address.
                        answer["cluster"]["urls"] = [f"{name}.nats-headless:6222" for name in addresses]
                    return answer

                trigger = triggers(specs["decode"], fetch)["batch"]

                async def right(trigger: Trigger = trigger) -> bool:
                    try:
                        return await trigger.lag() == 5
                    except TriggerError:  # While there is no leader; nothing is scaled then.
                        return False

                for _ in range(2):
                    await eventually(right, within=15)
                    # From then on the leader is asked at once, until it is another one.
                    trigger.asked.clear()
                    assert await right()
                    assert trigger.asked == [trigger.leader_url]
                    await jetstream.call(f"CONSUMER.LEADER.STEPDOWN.{consumer}")
        finally:
            await bus.close()


class Fleet:
    """A model of both roles: jobs that take time, workers that take time to load and to drain.

    A job holds a slot of a decode worker until it has had all of its seconds. A worker that is stopped
    finishes what it can in its grace period and hands the rest back, which goes on where it was.
    """

    GRACE = 60

    def __init__(self, specs: dict[str, dict[str, Any]], *, load_seconds: int) -> None:
        self.decode, self.prefill = Autoscaler(specs["decode"]), Autoscaler(specs["prefill"])
        self._load_seconds = load_seconds
        self.queue: list[float] = []
        self.running: dict[int, list[float]] = {}
        self.submitted = self.finished = 0
        self.counts: list[tuple[int, int]] = []
        self._next = 0
        self._ready: dict[int, int] = {}

    def submit(self, jobs: int, seconds: float) -> None:
        self.submitted += jobs
        self.queue.extend([seconds] * jobs)

    def step(self, now: int) -> None:
        lag = len(self.queue) + sum(map(len, self.running.values()))
        values = {"interactive": lag, "batch": 0}
        self.prefill.decide(now, values | {"decodes": self.decode.replicas})
        self._scale(now, self.decode.decide(now, values))
        assert self.decode.replicas or not lag
        self.counts.append((self.prefill.replicas, self.decode.replicas))
        for worker, jobs in self.running.items():
            if self._ready[worker] > now or not self.prefill.replicas:
                continue
            while self.queue and len(jobs) < SLOTS:
                jobs.append(self.queue.pop(0))
            self.running[worker] = [each - PERIOD for each in jobs if each > PERIOD]
            self.finished += len(jobs) - len(self.running[worker])

    def _scale(self, now: int, replicas: int) -> None:
        while len(self.running) < replicas:
            self.running[self._next], self._ready[self._next] = [], now + self._load_seconds
            self._next += 1
        while len(self.running) > replicas:
            # First those that are not ready, then by their deletion cost.
            worker = min(self.running, key=lambda each: (self._ready[each] <= now, len(self.running[each])))
            jobs = self.running.pop(worker)
            handed_back = [each - self.GRACE for each in jobs if each > self.GRACE]
            self.finished += len(jobs) - len(handed_back)
            self.queue[:0] = handed_back


def turns(counts: list[int]) -> int:
    """How often a number of workers went from growing to shrinking."""
    changes = [after - before for before, after in itertools.pairwise(counts) if after != before]
    return sum(before > 0 > after for before, after in itertools.pairwise(changes))


def steady(now: int) -> int:
    """Three jobs a second for two hours."""
    return 3 * PERIOD if now < 7200 else 0


def noisy(now: int) -> int:
    """The same in the mean, between none and six a second."""
    return random.Random(now).randrange(6 * PERIOD) if now < 7200 else 0


def bursts(now: int) -> int:
    """A burst every five minutes."""
    return 300 if now < 7200 and now % 300 == 0 else 0


def steps(now: int) -> int:
    """One job, then many an hour, then none."""
    return 1 if now == 0 else 60 if 3600 <= now < 7200 else 0


@pytest.mark.parametrize("load_seconds", [60, 900])
@pytest.mark.parametrize("load", [steady, noisy, bursts, steps])
def test_a_load_starts_workers_once_and_ends_without_any_and_without_a_lost_job(
    specs: dict[str, dict[str, Any]], load: Callable[[int], int], load_seconds: int
) -> None:
    fleet = Fleet(specs, load_seconds=load_seconds)
    for now in range(0, 7 * 3600, PERIOD):
        if jobs := load(now):
            fleet.submit(jobs, seconds=40)
        fleet.step(now)
    assert fleet.finished == fleet.submitted > 0
    prefill, decode = map(list, zip(*fleet.counts, strict=True))
    assert max(decode) > 1 or load is steps
    assert prefill[-1] == decode[-1] == 0
    # Not up and down with every wave: a rise for the load, and for what has queued while models were loaded.
    phases = 2 if load is steps else 1
    assert turns(decode) <= phases + 1
    assert turns(prefill) <= phases + 1
    # The roles keep step: one prefill worker for two decode workers.
    for one, two in fleet.counts:
        assert 0 <= one - math.ceil(two / 2) <= 2


def test_answers_longer_than_the_grace_period_go_on_elsewhere_at_a_scale_down(
    specs: dict[str, dict[str, Any]],
) -> None:
    fleet = Fleet(specs, load_seconds=300)
    fleet.submit(400, seconds=600)
    for now in range(0, 4 * 3600, PERIOD):
        # Some long answers all the time, so that workers that are taken away hold some.
        if now % 300 == 0 and now < 7200:
            fleet.submit(20, seconds=900)
        fleet.step(now)
    assert fleet.finished == fleet.submitted


def test_nothing_changes_while_a_trigger_has_no_value(specs: dict[str, dict[str, Any]]) -> None:
    scaler = Autoscaler(specs["decode"])
    for now in range(0, 600, PERIOD):
        scaler.decide(now, {"interactive": 200, "batch": 0})
    before = scaler.replicas
    assert before == 4
    assert {scaler.decide(now, None) for now in range(600, 7200, PERIOD)} == {before}


def test_every_class_is_a_trigger(specs: dict[str, dict[str, Any]]) -> None:
    names: tuple[JobClass, ...] = CLASSES
    for spec in specs.values():
        assert set(names) <= {each["name"] for each in spec["triggers"]}
