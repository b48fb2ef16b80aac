"""Permits, and ending an attempt from outside."""

from __future__ import annotations

import asyncio

import pytest

from inferbus.schemas.errors import Cancelled, DeadlineExceeded, Draining
from inferbus.schemas.subjects import JobKey
from inferbus.workers.jobs.scope import EARLY_SECONDS, Scope, Scopes
from tests.support import admitting

KEY = JobKey("acme", "j")


@pytest.mark.parametrize(
    ("total", "share", "for_jobs"), [(8, 0.25, 6), (1, 0.9, 1), (4, 0.0, 4), (3, 1.0, 1)]
)
async def test_jobs_leave_a_share_of_the_slots_to_live_requests(
    total: int, share: float, for_jobs: int
) -> None:
    slots = admitting.slots(total, live_share=share)
    for _ in range(for_jobs):
        await slots.take_job("batch")
    assert slots.no_room.is_set()
    assert sum(slots.take("live") is not None for _ in range(total)) == total - for_jobs
    assert slots.full


async def test_a_waiting_job_gets_the_next_slot_that_is_freed() -> None:
    slots = admitting.slots(1, live_share=0)
    permit = slots.take("live")
    assert permit is not None
    waiting = asyncio.create_task(slots.take_job("batch"))
    await asyncio.sleep(0)
    assert not waiting.done()
    permit.close()
    await waiting
    assert slots.busy == 1


async def test_a_cancelled_wait_takes_no_slot() -> None:
    slots = admitting.slots(1, live_share=0)
    permit = slots.take("live")
    assert permit is not None
    waiting = asyncio.create_task(slots.take_job("batch"))
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.wait([waiting])
    permit.close()
    assert slots.busy == 0


async def test_a_permit_is_given_back_once() -> None:
    slots = admitting.slots(2, live_share=0)
    with await slots.take_job("batch") as permit, await slots.take_job("batch"):
        permit.close()
        assert slots.busy == 1
    assert slots.busy == 0


async def test_every_change_is_told() -> None:
    seen: list[int] = []
    slots = admitting.slots(2, live_share=0)
    slots.on_change(lambda: seen.append(slots.busy))
    slots.take("live")
    with await slots.take_job("batch"):
        pass
    assert seen == [1, 2, 1]


async def forever() -> None:
    await asyncio.Event().wait()


async def test_the_first_reason_wins() -> None:
    scope = Scope(KEY, submission=None)
    asyncio.get_running_loop().call_soon(scope.end, Cancelled("first"))
    asyncio.get_running_loop().call_soon(scope.end, Draining("second"))
    with pytest.raises(Cancelled, match="first"):
        await scope.run(forever())


async def test_what_was_ended_before_it_began_does_not_begin() -> None:
    scope = Scope(KEY, submission=None)
    scope.end(Cancelled("early"))
    with pytest.raises(Cancelled):
        await scope.run(forever())


async def test_a_deadline_that_has_passed_ends_it_before_it_begins() -> None:
    with pytest.raises(DeadlineExceeded):
        await Scope(KEY, submission=None).run(forever(), deadline=-1.0)


async def test_ending_what_is_over_changes_nothing() -> None:
    scope = Scope(KEY, submission=None)

    async def answer() -> str:
        return "done"

    assert await scope.run(answer()) == "done"
    scope.end(Cancelled("late"))
    await asyncio.sleep(0)


async def test_a_cancelled_task_stays_cancelled_where_nobody_ended_the_scope() -> None:
    running = asyncio.create_task(Scope(KEY, submission=None).run(forever()))
    await asyncio.sleep(0)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running


async def test_scopes_are_found_by_job_until_they_are_forgotten() -> None:
    scopes = Scopes()
    one, two = Scope(KEY, submission=1), Scope(KEY, submission=2)
    forget_one, forget_two = scopes.add(one), scopes.add(two)
    assert set(scopes.find(KEY)) == {one, two}
    forget_one()
    assert scopes.find(KEY) == [two]
    forget_two()
    assert len(scopes) == 0
    assert scopes.find(KEY) == []


async def test_a_live_request_whose_cancel_is_handled_first_does_not_begin() -> None:
    scopes, scope = Scopes(), Scope(KEY, submission=None)
    scopes.end_early(KEY, Cancelled("early"))
    scopes.add(scope)
    with pytest.raises(Cancelled, match="early"):
        await scope.run(forever())


async def test_a_live_request_that_uses_the_id_of_a_cancelled_one_later_is_answered() -> None:
    now = 100.0
    scopes, scope = Scopes(clock=lambda: now), Scope(KEY, submission=None)
    scopes.end_early(KEY, Cancelled("early"))
    now += 2 * EARLY_SECONDS
    scopes.add(scope)

    async def answer() -> str:
        return "answer"

    assert await scope.run(answer()) == "answer"


async def test_an_early_cancel_hits_one_live_request_and_no_job() -> None:
    scopes = Scopes()
    scopes.end_early(KEY, Cancelled("early"))
    scopes.add(job := Scope(KEY, submission=7))
    scopes.add(Scope(KEY, submission=None))
    scopes.add(second := Scope(KEY, submission=None))

    async def answer() -> str:
        return "answer"

    assert await job.run(answer()) == "answer"
    assert await second.run(answer()) == "answer"
