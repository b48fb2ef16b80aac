"""The delivery contract under whatever may happen, in virtual time.

`SIMULATION_RUNS` says how many courses of events are tried: some in the suite, thousands on demand.
A failure tells the shortest one that was found, as a `Plan` that can be run again, and what happened in it.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Final

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from inferbus.schemas import headers
from inferbus.workers.bus.interface import Stored
from inferbus.workers.bus.jetstream.layout import RESULTS
from tests.simulation.plans import PLANS, Crash, Cut, Plan, Stall, Submit, Wait
from tests.simulation.worker import WEIGHTS
from tests.simulation.world import CLOCK, World, watched
from tests.support.virtual import EPOCH

RUNS: Final = int(os.environ.get("SIMULATION_RUNS", "100"))
explored = settings(
    max_examples=RUNS, deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow]
)
pytestmark = pytest.mark.timeout(120 + RUNS)


@explored
@given(PLANS)
def test_every_accepted_job_ends_once_whatever_happens(plan: Plan) -> None:
    plan.run()


def test_a_plan_is_the_same_course_of_events_every_time() -> None:
    plan = Plan(
        [Submit(name="long"), Submit(1, "flaky", "chat"), Wait(3.0), Stall(), Cut(1), Wait(45.0), Crash()],
        seed=7,
        workers=3,
    )
    assert plan.run().trace == plan.run().trace


@pytest.mark.parametrize("skew", [75.0, -75.0])
def test_a_worker_whose_clock_is_wrong_ends_a_job_at_its_deadline(skew: float) -> None:
    world = Plan(
        [Submit(0, "steady", deadline=20.0), Wait(12.0), Submit(1, "hang", deadline=20.0)],
        workers=1,
        skew=skew,
    ).run()
    first, second = world.server.streams[RESULTS].messages.values()
    assert first.headers[headers.STATUS] == "ok"
    assert second.headers[headers.STATUS] == "expired"
    late = (second.time - EPOCH).total_seconds() - (world.submissions[2].deadline or 0.0)
    assert 0 <= late + CLOCK <= 2 * CLOCK


@settings(explored, max_examples=max(RUNS // 10, 10))
@given(st.integers(0, 2**16), st.integers(1, 3), st.integers(1, 2))
def test_no_class_waits_for_ever(seed: int, workers: int, slots: int) -> None:
    world = World(seed=seed, workers=workers, slots=slots, calm=True)
    passed = _endless(world, "interactive")
    try:
        with watched(world.wrong):
            for _ in range(3 * workers * slots):
                world.submit(len(world.submissions), "quick", job_class="interactive")
            world.time.run(20.0)
            waiting = world.submit(len(world.submissions), "quick", job_class="batch")
            assert waiting is not None
            before = passed()
            world.time.run(60.0, until=lambda: world.runs[waiting.sequence] > 0)
            # Every worker gives the lighter class one turn of so many; others may be under way.
            assert passed() - before <= workers * (sum(WEIGHTS.values()) + 2 * slots)
            assert world.runs[waiting.sequence] == 1
    finally:
        world.close()
    assert not world.problems


def _endless(world: World, job_class: str) -> Callable[[], int]:
    """Submits another job whenever one of a class is done; tells how many were."""
    done: list[int] = []
    removed = world.server.removed

    def again(job: Stored) -> None:
        removed(job)
        if f".{job_class}." in job.subject:
            done.append(job.sequence)
            world.submit(len(world.submissions), "quick", job_class="interactive")

    world.server.removed = again
    return lambda: len(done)
