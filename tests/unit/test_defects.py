"""Unexpected exceptions at supervision points: logged, counted, and told to Prometheus."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args

from structlog.testing import capture_logs

import inferbus
from inferbus.workers.gateway import metrics as gateway
from inferbus.workers.observe import defects
from inferbus.workers.observe.metrics import Metrics
from tests.unit.test_metrics import ENGINE, told

PACKAGE = Path(inferbus.__path__[0]) / "workers"
ENGINES = PACKAGE / "engine"
"""It runs in SGLang's processes, whose metrics are SGLang's own."""


def test_a_defect_is_logged_with_its_fields_and_counted_under_its_event() -> None:
    before = dict(defects.counts)
    with capture_logs() as logs:
        try:
            raise RuntimeError("unexpected")
        except RuntimeError:
            defects.exception("job.defect", job="j1")
    assert [(entry["event"], entry["log_level"], entry["job"]) for entry in logs] == [
        ("job.defect", "error", "j1")
    ]
    assert {
        event: count - before[event] for event, count in defects.counts.items() if count != before[event]
    } == {"job.defect": 1}


def test_a_worker_and_a_gateway_tell_of_every_event_from_the_start() -> None:
    found = told(Metrics("both", ENGINE))
    door = gateway.Metrics().text().decode()
    for event, count in defects.counts.items():
        assert found("inferbus_defects_total", event=event, role="both", model="m") == count
        assert f'inferbus_defects_total{{event="{event}"}} {count:.1f}' in door


def test_every_supervision_point_counts_and_every_event_has_one() -> None:
    files = [path for path in PACKAGE.rglob("*.py") if ENGINES not in path.parents]
    texts = {path: path.read_text() for path in files if path.name != "defects.py"}
    # Ruff (BLE001) sees to it that a broad `except` raises again or logs; this, that its log counts.
    assert [path for path, text in texts.items() if re.search(r"\blog\.exception\(", text)] == []
    used = {event for text in texts.values() for event in re.findall(r'defects\.exception\("([^"]+)"', text)}
    assert used == set(get_args(defects.Event))
