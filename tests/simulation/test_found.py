"""What the model found, as short as it can be told; each was a defect once."""

from __future__ import annotations

import pytest

from tests.simulation.plans import CancelJob, Cut, Drain, Plan, Stall, Submit, Wait

FOUND = {
    # The result of the first one, stored meanwhile, kept the second one from having its own.
    "a submission has its own result though an earlier one with its id ended while it ran": Plan(
        [Submit(name="long"), Wait(21.0), Submit(name="long")]
    ),
    # Its nak reached the server, which asks nobody whose job it is.
    "a worker that stood still does not ask back a job that has another owner": Plan(
        [Submit(name="hang", deadline=300.0), Wait(3.0), Drain(grace=3.0), Stall(seconds=40.0), Wait(60.0)]
    ),
    # Only the newest cancel of an id was kept and looked at.
    "a cancel is not forgotten for that of a later submission with the same id": Plan(
        [
            Submit(name="long"),
            Submit(1, "steady"),
            CancelJob(1, back=0),
            Wait(21.0),
            Submit(1, "steady"),
            CancelJob(1, back=0),
        ],
        workers=1,
    ),
    # It was an error that nobody caught, so the job came back until it was buried.
    "an answer that is too large as a whole is its caller's mistake": Plan(
        [Submit(name="big")], max_payload=1024
    ),
    # Likewise, and for ever.
    "a job that fits a message but not a dead letter ends all the same": Plan(
        [Submit(name="broken", filler=270)], max_payload=1024
    ),
    # It was not among those that were ended.
    "nothing begins at a worker whose grace period is over": Plan(
        [Submit(name="long"), Wait(0.02), Drain(grace=0.0), Wait(60.0)], workers=1
    ),
    # Cancels were heard or missed, and looked up before an attempt alone.
    "a cancel that came while the worker was cut off ends its job": Plan(
        [Submit(name="long"), Wait(1.0), Cut(seconds=4.0), CancelJob(), Wait(60.0)], workers=1
    ),
}


@pytest.mark.parametrize("plan", FOUND.values(), ids=FOUND)
def test_it_is_not_so_any_more(plan: Plan) -> None:
    plan.run()
