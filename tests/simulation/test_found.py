"""What the model found, as short as it can be told; each was a defect once."""

from __future__ import annotations

from typing import Any

import pytest

from inferbus.schemas.errors import BusUnavailable
from inferbus.workers.bus.connection.message import Message
from inferbus.workers.bus.queue.delivery import ACK_TRIES, AckSubject, Heartbeats, NatsDelivery
from tests.simulation.plans import Away, CancelJob, Cut, Drain, Plan, Stall, Submit, Wait
from tests.support.virtual import EPOCH

FOUND = {
    # It looked for cancels that it had not heard, though it had nothing left that they could aim at.
    "a worker that drains begins nothing for a connection that comes back": Plan(
        [Away(0.02), Drain(grace=0.0), Stall(seconds=5.0), Wait(10.0)], workers=1, buffering=False
    ),
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
    # A server that was killed knows ids only of what it still holds.
    "a job that has ended does not run again when it is handed in once more": Plan(
        [Submit(), Wait(3.0), Away(4.0, forget=1), Wait(10.0), Submit()]
    ),
    # Each overwrote the other's count of last attempts, so that a job that kills its workers did so for ever.
    "two submissions of one job that kills its workers are given up each by itself": Plan(
        [
            Submit(name="killer", shape="pair", job_class="interactive"),
            Cut(seconds=4.0),
            Wait(61.0),
            Submit(name="killer", shape="pair", job_class="interactive"),
            Cut(seconds=25.0),
            Wait(61.0),
        ],
        workers=1,
        attempts=5,
    ),
    # It was read as one answer: a piece by one worker, the rest by the other.
    "an attempt that a killed server forgot is not mixed with the one that took its number": Plan(
        [Submit(name="other", job_class="interactive"), Wait(0.03), Away(0.02, forget=1)], buffering=False
    ),
    # Cancels were heard or missed, and looked up before an attempt alone.
    "a cancel that came while the worker was cut off ends its job": Plan(
        [Submit(name="long"), Wait(1.0), Cut(seconds=4.0), CancelJob(), Wait(60.0)], workers=1
    ),
}


@pytest.mark.parametrize("plan", FOUND.values(), ids=FOUND)
def test_it_is_not_so_any_more(plan: Plan) -> None:
    plan.run()


class _Silent:
    """A bus that never answers."""

    def __init__(self) -> None:
        self.asked: list[bytes] = []

    async def request(self, subject: str, data: bytes, **_: Any) -> None:
        self.asked.append(data)
        raise BusUnavailable("no answer")


@pytest.mark.parametrize(("end", "times"), [("nak", 1), ("ack", ACK_TRIES)])
async def test_a_job_is_asked_back_once_since_a_second_nak_would_hit_its_next_owner(
    end: str, times: int
) -> None:
    bus: Any = _Silent()
    ack = AckSubject(stream="S", consumer="C", attempt=1, sequence=1, time=EPOCH)
    delivery = NatsDelivery(bus, Message("s", b"", {}, "r"), ack, Heartbeats(bus, 30.0))
    with pytest.raises(BusUnavailable):
        await (delivery.nak(1.0) if end == "nak" else delivery.ack())
    assert len(bus.asked) == times
