"""What the benchmarks read out of prefill workers' logs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.handoffs import Logs

TOKEN_BYTES = 1000


def logged(log: Path, event: str, **fields: Any) -> None:
    """A line as a worker writes it."""
    with log.open("a") as file:
        # The event does not come first: what is bound to every event does.
        file.write(json.dumps({"worker": "p", **fields, "event": event}, separators=(",", ":")) + "\n")


def test_transfers_are_told_beside_the_hand_offs_that_they_are_part_of(tmp_path: Path) -> None:
    log = tmp_path / "prefill.log"
    for seconds in (0.001, 0.002, 0.004):
        logged(log, "handoff.done", seconds=0.1, transfer_seconds=seconds, transfer_bytes=4_000_000)
    logged(log, "handoff.failed", code="prefill_failed")
    told = Logs({"p": log}).handoffs(1000, TOKEN_BYTES)
    assert told.seconds is not None
    assert (told.seconds.n, told.seconds.p50, told.failed) == (3, 100.0, 1)
    assert told.gbytes == {"p50": 0.01, "p90": 0.01}
    assert told.transfer_seconds is not None
    assert (told.transfer_seconds.n, told.transfer_seconds.p50) == (3, 2.0)
    assert told.transfer_gbytes == {"p50": 2.0, "p90": 4.0}


def test_logs_of_workers_that_tell_of_no_transfer_are_read_as_before(tmp_path: Path) -> None:
    log = tmp_path / "prefill.log"
    logged(log, "handoff.done", seconds=0.1)
    reader = Logs({"p": log})
    told = reader.handoffs(1000, TOKEN_BYTES)
    assert told.seconds is not None
    assert told.transfer_seconds is None
    assert told.transfer_gbytes is None
    again = reader.handoffs(1000, TOKEN_BYTES)
    assert again.seconds is again.transfer_seconds is None
