"""What `inferbus top` draws of a given state."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from inferbus.schemas.fleet import Capacity, Load, WorkerInfo
from inferbus.workers.cli.screen import drawn
from inferbus.workers.top.snapshot import BatchLine, Ended, QueueLine, Snapshot, rated

CAPACITY = Capacity(
    context_length=4096,
    kv_tokens=1000,
    page_size=1,
    max_running=8,
    max_prefill_tokens=64,
    vocabulary=256,
)


def worker(name: str, **fields: object) -> WorkerInfo:
    given: dict[str, object] = {
        "worker": name,
        "role": "decode",
        "state": "ready",
        "model": "llama",
        "kinds": ["chat"],
        "tokenizer": True,
        "engine": "scripted",
        "version": "0",
        "host": "h",
        "started": 1.0,
        "load": Load(slots=8, busy=3, running=2, waiting=1, kv_used=250, queued=4),
        "capacity": CAPACITY,
    }
    return WorkerInfo(**(given | fields))  # type: ignore[arg-type]


QUEUE = QueueLine(
    model="llama",
    job_class="batch",
    pending=120,
    taken=6,
    redelivered=2,
    pulls=0,
    oldest=95.0,
    paused=True,
)
BATCH = BatchLine(
    id="b1",
    owner="acme",
    model="llama",
    status="in_progress",
    lines=200,
    ended=50,
    failed=1,
    tokens=1000,
    rate=12.5,
)


def text(now: Snapshot) -> list[str]:
    """The lines as a wide terminal shows them."""
    console = Console(width=140, file=io.StringIO())
    console.print(drawn(now))
    printed = console.file
    assert isinstance(printed, io.StringIO)
    return [line.rstrip() for line in printed.getvalue().splitlines()]


def test_a_fleet_is_drawn_with_its_workers_queues_batches_and_troubles() -> None:
    before = Snapshot(at=10.0, ended={"d1": Ended(requests=10, errors=1, seconds=5.0)}, batches=[BATCH])
    grown = BatchLine(
        id="b1",
        owner="acme",
        model="llama",
        status="in_progress",
        lines=200,
        ended=100,
        failed=1,
        tokens=1600,
        rate=12.5,
    )
    now = Snapshot(
        at=12.0,
        workers=[worker("d1"), worker("d\x1b2", state="failed", reason="no memory", capacity=None)],
        ended={"d1": Ended(requests=20, errors=2, seconds=10.0)},
        queues=[QUEUE],
        batches=[grown],
        dead=7,
        troubles=["the stream INFER_JOBS is nearly full"],
        hidden=["dead letters"],
    )
    assert [" ".join(line.split()) for line in text(rated(before, now)) if line] == [
        "2 workers · 3/8 slots · 5.0 requests/s · 0.5 errors/s · 120 jobs queued · 300 tokens/s of batches "
        "· 7 dead letters",
        "worker role model state busy held engine kv req/s err/s mean",
        "d1 decode llama ready 3/8 4 2+1 25% 5.0 0.5 0.50 s",
        "d\\x1b2 decode llama failed: no memory 3/8 4 2+1 - - - -",
        "queue class pending taken again pulls oldest",
        "llama batch 120 6 2 0 1m35s paused",
        "batch owner model status done lines failed lines/s",
        "b1 acme llama in_progress 50% 200 1 12.5",
        "the stream INFER_JOBS is nearly full",
        "this user may not look at: dead letters",
    ]


def test_an_empty_fleet_is_drawn() -> None:
    assert text(Snapshot(at=0.0))[0] == "0 workers · 0/0 slots · 0 jobs queued"


def test_a_worker_that_was_started_again_has_no_rate_at_first() -> None:
    before = Snapshot(at=0.0, ended={"d1": Ended(requests=100), "d2": Ended(requests=1)})
    now = rated(before, Snapshot(at=1.0, ended={"d1": Ended(requests=3), "d2": Ended(requests=3)}))
    assert now.rates.keys() == {"d2"}
    assert now.rates["d2"].requests == pytest.approx(2.0)
