"""What a worker counts, after answers, jobs and hand-offs of every kind."""

from __future__ import annotations

import asyncio
import re
import socket
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import generate_latest

from inferbus.schemas import headers
from inferbus.schemas.errors import EngineFailed, InferbusError, InvalidRequest, Overloaded
from inferbus.schemas.fleet import Load
from inferbus.schemas.handoff import Transfer
from inferbus.schemas.subjects import Subjects
from inferbus.workers.bus.interface import Stored
from inferbus.workers.config import WorkerSettings
from inferbus.workers.engine.scripted import ScriptedEngine
from inferbus.workers.jobs.attempt import Envelope, live
from inferbus.workers.jobs.cancel import Cancels
from inferbus.workers.jobs.delivery import Deliveries
from inferbus.workers.jobs.retry import RetryPolicy
from inferbus.workers.jobs.runner import AttemptRunner, Work
from inferbus.workers.jobs.scope import Scope
from inferbus.workers.jobs.settings import JobSettings
from inferbus.workers.observe import defects
from inferbus.workers.observe.endpoint import Unserved, serving
from inferbus.workers.observe.health import Health
from inferbus.workers.observe.metrics import Metrics, check, serve
from tests.support.memory import MemoryBroker, MemoryDelivery
from tests.support.prometheus import Scrape, scrape

SUBJECTS = Subjects()
BODY = b'{"token_ids":[1,2]}'
ENGINE = ScriptedEngine(role="both", model="m").info
LABELS = {
    "role",
    "model",
    "kind",
    "class",
    "status",
    "code",
    "outcome",
    "le",
    "version",
    "engine",
    "stream",
    "event",
}

Answer = Callable[[Work], Awaitable[bytes]]


@pytest.fixture(autouse=True)
def no_defects(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a new process."""
    for event in defects.counts:
        monkeypatch.setitem(defects.counts, event, 0)


class Bench:
    """One worker's attempts and deliveries, counted."""

    def __init__(self, answer: Answer) -> None:
        self.broker = MemoryBroker()
        self.metrics = Metrics("both", ENGINE)
        settings = JobSettings(
            worker="w1", subjects=SUBJECTS, policy=RetryPolicy(attempts=2, jitter=0), window=600.0
        )
        self.runner = AttemptRunner(self.broker, answer, settings, observer=self.metrics, now=self.broker.now)
        cancels = Cancels(self.broker, self.runner.scopes, SUBJECTS)
        self.deliveries = Deliveries(self.broker, self.runner, cancels, settings, observer=self.metrics)

    def envelope(self, body: bytes = BODY) -> Envelope:
        message = Stored(
            subject=SUBJECTS.request("m", "tokens"), data=body, headers={}, sequence=0, time=self.broker.now()
        )
        return live(message, reply="_INBOX.x", fallback_id="j", subjects=SUBJECTS, replies=("_INBOX.",))

    async def live(self, body: bytes = BODY) -> None:
        envelope = self.envelope(body)
        outcome = await self.runner.run(envelope, Scope(envelope.attempt.key, submission=None))
        outcome.answer()

    async def job(self, *, attempt: int = 1, sequence: int = 7) -> None:
        message = Stored(
            subject=SUBJECTS.job("m", "batch", "acme", "tokens"),
            data=BODY,
            headers={headers.JOB_ID: f"j{sequence}"},
            sequence=sequence,
            time=self.broker.now(),
        )
        await self.deliveries.handle(MemoryDelivery(message, attempt))

    @property
    def told(self) -> Scrape:
        return told(self.metrics)


def told(metrics: Metrics) -> Scrape:
    """What Prometheus would be told now."""
    return Scrape(generate_latest(metrics.registry).decode())


async def three_chunks(work: Work) -> bytes:
    for _ in range(3):
        work.reply.chunk(b'{"x":1}')
    return b"{}"


def failing(error: InferbusError) -> Answer:
    async def answer(work: Work) -> bytes:
        raise error

    return answer


async def test_a_streamed_answer_counts_once_with_its_chunks_and_its_first_one() -> None:
    bench = Bench(three_chunks)
    await bench.live()
    await bench.live()
    told, of = bench.told, {"role": "both", "model": "m", "kind": "tokens", "cls": "live"}
    assert told("inferbus_requests_total", **of, status="ok", code="") == 2
    assert told("inferbus_requests_total") == 2
    assert told("inferbus_request_seconds_count", **of, status="ok") == 2
    assert told("inferbus_chunks_total", **of) == 6
    assert told("inferbus_first_chunk_seconds_count", **of) == 2
    assert told("inferbus_first_chunk_seconds_sum") <= told("inferbus_request_seconds_sum")
    assert told("inferbus_jobs_total") == told("inferbus_redeliveries_total") == 0


async def test_an_answer_in_one_piece_has_no_first_chunk() -> None:
    async def whole(work: Work) -> bytes:
        return b"{}"

    bench = Bench(whole)
    await bench.live(b'{"token_ids":[1],"stream":false}')
    assert bench.told("inferbus_requests_total", status="ok") == 1
    assert bench.told("inferbus_first_chunk_seconds_count") == bench.told("inferbus_chunks_total") == 0


@pytest.mark.parametrize("error", [InvalidRequest("no"), EngineFailed("no")])
async def test_a_failed_request_counts_under_its_code(error: InferbusError) -> None:
    bench = Bench(failing(error))
    await bench.live()
    await bench.live(b"not JSON")
    assert bench.told("inferbus_requests_total", status="error", code=error.code) == 1
    assert bench.told("inferbus_requests_total", status="error", code="undecodable_body") == 1
    assert bench.told("inferbus_request_seconds_count", status="error") == 2


async def test_a_request_that_found_no_slot_counts_without_a_time() -> None:
    bench = Bench(three_chunks)
    bench.runner.refuse(bench.envelope(), Overloaded("full"))
    assert bench.told("inferbus_requests_total", cls="live", status="error", code="overloaded") == 1
    assert bench.told("inferbus_request_seconds_count") == 0


async def test_a_job_counts_with_what_became_of_each_delivery() -> None:
    bench = Bench(three_chunks)
    await bench.job()
    await bench.job()
    told = bench.told
    assert told("inferbus_requests_total", cls="batch", status="ok") == 1
    assert told("inferbus_jobs_total", cls="batch", outcome="finished", code="") == 1
    assert told("inferbus_jobs_total", outcome="repeated") == 1
    assert told("inferbus_redeliveries_total") == 0


async def test_a_job_that_is_given_up_counts_as_retried_and_then_as_dead() -> None:
    bench = Bench(failing(EngineFailed("no")))
    await bench.job(attempt=1)
    await bench.job(attempt=2)
    told = bench.told
    assert told("inferbus_jobs_total", outcome="retried", code="engine_failed") == 1
    assert told("inferbus_jobs_total", outcome="dead", code="engine_failed") == 1
    assert told("inferbus_redeliveries_total", cls="batch") == 1
    assert told("inferbus_requests_total", cls="batch", status="error", code="engine_failed") == 2


async def test_every_series_that_moves_was_there_at_0_so_that_rates_see_its_first_event() -> None:
    bench = Bench(failing(EngineFailed("no")))
    prefill = Metrics("prefill", ENGINE)
    before = bench.told.series | told(prefill).series
    assert not any(value for (name, _), value in before.items() if name.startswith("inferbus_"))
    await bench.job(attempt=1)
    await bench.job(attempt=2)
    bench.runner.refuse(bench.envelope(), Overloaded("full"))
    await bench.live(b"not JSON")
    streaming = Bench(three_chunks)
    await streaming.live()
    await streaming.job()
    prefill.handed_off(0.1, None, Transfer(seconds=0.1, bytes=1))
    prefill.handed_off(0.1, "prefill_failed", None)
    prefill.turned_away("overloaded")
    after = bench.told.series | told(prefill).series | streaming.told.series
    moved = {series for series, value in after.items() if series[0].startswith("inferbus_") and value}
    assert len(moved) > 20
    assert moved <= before.keys()


def test_every_documented_query_has_series_from_the_start() -> None:
    text = (Path(__file__).parents[2] / "docs" / "operating.md").read_text()
    selectors = re.findall(r"rate\((inferbus_\w+)(?:\{([^}]*)\})?\[", text)
    assert len(selectors) >= 6
    from_start = told(Metrics("both", ENGINE)).series | told(Metrics("prefill", ENGINE)).series
    for name, labels in selectors:
        wanted = set(re.findall(r'(\w+)="([^"]*)"', labels))
        assert any(name == found and wanted <= given for found, given in from_start), (name, labels)


def test_hand_offs_count_with_their_transfers() -> None:
    metrics = Metrics("prefill", ENGINE)
    metrics.handed_off(0.5, None, Transfer(seconds=0.003, bytes=100_000))
    metrics.handed_off(0.5, None, None)
    metrics.handed_off(20.0, "prefill_failed", None)
    metrics.turned_away("overloaded")
    found = told(metrics)
    assert found("inferbus_handoffs_total", status="ok", code="", role="prefill") == 2
    assert found("inferbus_handoffs_total", status="error", code="prefill_failed") == 1
    assert found("inferbus_handoffs_total", status="refused", code="overloaded") == 1
    assert found("inferbus_handoff_seconds_count") == 3
    assert found("inferbus_kv_transfer_seconds_count") == found("inferbus_kv_transfer_bytes_count") == 1
    assert found("inferbus_kv_transfer_seconds_bucket", le="0.002") == 0
    assert found("inferbus_kv_transfer_seconds_bucket", le="0.005") == 1
    assert found("inferbus_kv_transfer_bytes_sum") == 100_000


def test_how_busy_the_worker_is_is_looked_up_when_asked() -> None:
    metrics = Metrics("decode", ENGINE)
    load = Load(slots=8)
    bus: Any = SimpleNamespace(connected=True, reconnects=0, writer=SimpleNamespace(sent=5, dropped=0))
    clock: Any = SimpleNamespace(skew=75.0)
    metrics.watch(lambda: load, bus, clock)
    assert told(metrics)("inferbus_slots") == 8
    assert told(metrics)("inferbus_nats_connected") == 1
    load = Load(slots=8, busy=3, running=2, waiting=1, kv_used=77)
    bus.connected, bus.writer.dropped = False, 4
    found = told(metrics)
    names = ("slots_busy", "engine_running_requests", "engine_waiting_requests", "engine_kv_used_tokens")
    assert [found(f"inferbus_{name}", role="decode", model="m") for name in names] == [3, 2, 1, 77]
    assert found("inferbus_engine_kv_tokens") == ENGINE.capacity.kv_tokens
    assert found("inferbus_nats_connected") == 0
    assert found("inferbus_messages_dropped_total") == 4
    assert found("inferbus_clock_skew_seconds") == 75
    assert found("inferbus_worker_info", engine="scripted") == 1


async def test_no_label_has_an_id_an_owner_or_a_subject() -> None:
    bench = Bench(failing(EngineFailed("no")))
    await bench.job(attempt=2)
    await bench.live()
    bench.metrics.handed_off(0.1, None, Transfer(seconds=0.1, bytes=1))
    assert bench.told.labels <= LABELS
    assert not any(word in bench.told.text for word in ("acme", "j7", "_INBOX", "w1"))


def health() -> Health:
    return Health(lambda: "loading weights")


async def test_metrics_are_served_while_asked_for_and_not_after() -> None:
    settings = WorkerSettings(metrics_port=free_port(), metrics_host="127.0.0.1")
    assert settings.metrics_port is not None
    async with serving(settings, health()) as port:
        assert port is not None
        with pytest.raises(OSError, match="503"):
            await scrape(settings.metrics_port)
        metrics = serve(port, ENGINE, role="both")
        metrics.handed_off(0.1, None, None)
        assert (await scrape(settings.metrics_port))("inferbus_handoffs_total") == 1
    with pytest.raises(OSError, match="refused"):
        await scrape(settings.metrics_port)


async def test_without_a_port_nothing_is_counted_or_imported() -> None:
    code = (
        "import asyncio, sys;"
        "from inferbus.workers.config import WorkerSettings; from inferbus.workers.observe import metrics;"
        "from inferbus.workers.observe.endpoint import serving;"
        "found = asyncio.run(serving(WorkerSettings(), None).__aenter__());"
        "sys.exit(found is not None or 'prometheus_client' in sys.modules)"
    )
    done = await asyncio.to_thread(subprocess.run, [sys.executable, "-c", code], check=False)
    assert done.returncode == 0


async def test_a_busy_port_is_told_with_its_setting() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        settings = WorkerSettings(metrics_port=taken.getsockname()[1], metrics_host="127.0.0.1")
        with pytest.raises(Unserved, match=r"--metrics-port: cannot listen on 127\.0\.0\.1:\d+: .*in use"):
            async with serving(settings, health()):
                pytest.fail("it served")


def test_a_folder_for_sglangs_metrics_that_is_not_there_is_told_before_the_engine_loads(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path / "none"))
    with pytest.raises(Unserved, match="PROMETHEUS_MULTIPROC_DIR"):
        check()


def test_no_answer_is_lost_for_a_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    metrics = Metrics("prefill", ENGINE)
    monkeypatch.setattr(metrics, "_handoffs", lambda *_: 1 / 0)
    metrics.handed_off(1.0, None, None)


def free_port() -> int:
    """A port that nothing listens on."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
    return port
