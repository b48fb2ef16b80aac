"""The delivery contract under whatever may happen, in virtual time."""

from __future__ import annotations

from hypothesis import HealthCheck, given, settings

from tests.simulation.plans import PLANS, Plan


@settings(deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow])
@given(PLANS)
def test_every_accepted_job_ends_once_whatever_happens(plan: Plan) -> None:
    plan.run()
