"""Which fields an event of the log has."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

PROGRAM = """
import asyncio, structlog
from structlog.contextvars import bind_contextvars
from inferbus.workers.observe import logs

logs.configure(format="json", worker="w1")
log = structlog.get_logger()

async def attempt(job):
    bind_contextvars(job=job)
    await asyncio.sleep(0)
    log.info("leg.aborted")

async def main():
    await asyncio.gather(attempt("a"), attempt("b"))
    log.info("worker.ready")

asyncio.run(main())
assert logs.settings() == {"level": "INFO", "format": "json", "cache": False, "worker": "w1"}
"""


def test_events_of_a_task_have_the_job_that_it_bound_and_every_event_has_the_worker() -> None:
    run = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    events = [json.loads(line) for line in run.stderr.splitlines()]
    assert [(event["event"], event.get("job"), event["worker"]) for event in events] == [
        ("leg.aborted", "a", "w1"),
        ("leg.aborted", "b", "w1"),
        ("worker.ready", None, "w1"),
    ]


FAILING = """
import structlog
from inferbus.workers.observe import logs

def attempt():
    prompt = "topsecret"
    raise ValueError("no luck")

logs.configure(format={format!r})
try:
    attempt()
except ValueError:
    structlog.get_logger().exception("job.defect")
"""


@pytest.mark.parametrize("format", ["json", "text"])
def test_a_traceback_shows_no_local_variables(format: str) -> None:
    run = subprocess.run(
        [sys.executable, "-c", FAILING.format(format=format)], capture_output=True, text=True, check=True
    )
    assert "no luck" in run.stderr
    assert "attempt" in run.stderr
    assert "topsecret" not in run.stderr
