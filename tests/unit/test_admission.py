"""Which request starts: budgets of prompt tokens, KV tokens and slots, and the life of a permit."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from itertools import count
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inferbus.workers.admission import (
    BATCH,
    INTERACTIVE,
    LIVE,
    Admission,
    Budget,
    HeldPermit,
    ServiceClass,
    class_of,
    engine_priority,
)
from inferbus.workers.admission.classes import PREEMPTION_THRESHOLD
from inferbus.workers.admission.forecast import FIRST_PROMPT, Expectation, peak

GROWING = st.tuples(st.integers(0, 500), st.integers(0, 60))


def admission(**fields: Any) -> Admission:
    limits = {"slots": 100, "kv_tokens": 100_000, "window": 1000, "staged": 500, "live_share": 0.0}
    return Admission(Budget(**(limits | fields)))


async def entered(held: Admission, service_class: ServiceClass, prompt: int, allowed: int = 10) -> HeldPermit:
    """A request that is taken and comes in with its size; whether it starts is another question."""
    permit = held.take(LIVE) if service_class == LIVE else await held.take_job(service_class)
    assert permit is not None
    entering.append(asyncio.create_task(permit.enter(prompt, allowed)))
    await asyncio.sleep(0)
    return permit


entering: list[asyncio.Task[None]] = []


@pytest.fixture(autouse=True)
def nothing_goes_on() -> Iterator[None]:
    entering.clear()
    yield
    for task in entering:
        task.cancel()


@given(st.lists(GROWING, max_size=12))
def test_the_peak_is_what_counting_step_by_step_gives(requests: list[tuple[int, int]]) -> None:
    counted = 0
    for step in count():
        counted = max(counted, sum(used + min(step, left) for used, left in requests if left >= step))
        if all(left <= step for _, left in requests):
            break
    assert peak(requests) == counted


def test_requests_of_different_ages_need_less_than_the_sum_of_their_final_sizes() -> None:
    assert peak([(100, 50), (150, 0)]) == 250
    assert peak([(100, 50), (140, 10)]) == 260
    assert peak([]) == 0


def test_answers_are_taken_to_have_their_full_length_until_some_have_ended() -> None:
    expectation = Expectation()
    assert (expectation.prompt, expectation.new_tokens(0, 100)) == (FIRST_PROMPT, 100)
    for _ in range(200):
        expectation.saw_answer(25, 100)
    assert expectation.new_tokens(0, 100) == 25
    assert expectation.new_tokens(60, 100) == 10
    assert expectation.new_tokens(120, 100) == 0


def test_every_retraction_makes_answers_longer_up_to_their_full_length() -> None:
    expectation = Expectation()
    for _ in range(200):
        expectation.saw_answer(1, 100)
    before = expectation.share
    expectation.retracted()
    assert expectation.share > before
    for _ in range(100):
        expectation.retracted()
    assert expectation.share == 1.0


def test_prompts_are_expected_to_be_as_long_as_the_last_ones() -> None:
    expectation = Expectation()
    for _ in range(50):
        expectation.saw_prompt(4000)
    assert expectation.prompt == pytest.approx(4000, rel=0.01)


def test_an_answer_that_may_have_no_token_teaches_nothing() -> None:
    expectation = Expectation()
    expectation.saw_answer(0, 0)
    assert expectation.share == 1.0


@given(st.none() | st.integers(), st.none() | st.integers())
def test_no_callers_priority_leaves_its_class(first: int | None, second: int | None) -> None:
    live, interactive, batch = (engine_priority(name, first) for name in (LIVE, INTERACTIVE, BATCH))
    assert live > engine_priority(INTERACTIVE, second) > engine_priority(BATCH, first)
    # A live request may displace a job, and no job another.
    assert live - engine_priority(INTERACTIVE, second) > PREEMPTION_THRESHOLD
    assert interactive - batch < PREEMPTION_THRESHOLD


def test_priorities_order_requests_within_a_class() -> None:
    assert engine_priority(BATCH, 3) > engine_priority(BATCH, None) > engine_priority(BATCH, -3)


async def test_a_prompt_starts_while_fewer_tokens_than_the_window_are_ahead_of_it() -> None:
    held = admission()
    first = await entered(held, BATCH, 600)
    second = await entered(held, BATCH, 600)
    third = await entered(held, BATCH, 600)
    assert (first.waits, second.waits, third.waits) == (True, True, False)
    assert (held.window_used, held.queued, held.busy) == (1200, 1, 3)
    first.first_token()
    assert third.waits
    assert held.window_used == 1200


async def test_a_prompt_larger_than_the_window_starts_where_nothing_is_ahead() -> None:
    held = admission()
    assert (await entered(held, BATCH, 5000)).waits
    assert not (await entered(held, BATCH, 10)).waits


async def test_a_live_request_waits_for_live_prompts_alone() -> None:
    held = admission()
    await entered(held, BATCH, 1000)
    job = await entered(held, BATCH, 100)
    assert (await entered(held, LIVE, 1000)).waits
    live = await entered(held, LIVE, 100)
    assert (job.waits, live.waits) == (False, False)


async def test_the_most_urgent_class_starts_first() -> None:
    held = admission(staged=10_000)
    first = await entered(held, BATCH, 1000)
    batch, interactive = await held.take_job(BATCH), await held.take_job(INTERACTIVE)
    entering.extend(asyncio.create_task(permit.enter(1000, 10)) for permit in (batch, interactive))
    await asyncio.sleep(0)
    first.first_token()
    assert (batch.waits, interactive.waits) == (False, True)


async def test_no_job_is_taken_while_one_waits_here() -> None:
    held = admission()
    assert held.room.is_set()
    first = await entered(held, BATCH, 1000)
    await entered(held, BATCH, 1000)
    assert held.no_room.is_set()
    first.first_token()
    assert held.window_used == 1000
    assert held.room.is_set()


async def test_one_job_is_taken_beside_any_number_of_live_requests() -> None:
    held = admission()
    for _ in range(10):
        await entered(held, LIVE, 1000)
    assert held.room.is_set()
    await held.take_job(BATCH)
    assert held.no_room.is_set()


async def test_after_many_live_prompts_a_job_that_waits_has_its_turn() -> None:
    held = admission()
    previous = await entered(held, LIVE, 1000)
    job = await entered(held, BATCH, 1000)
    started = 0
    while not job.waits:
        current = await entered(held, LIVE, 1000)
        previous.first_token()
        started += 1
        assert started < 100
        previous = current
    assert started > 10
    assert not previous.waits
    job.first_token()
    assert previous.waits


async def test_jobs_leave_a_share_of_the_kv_cache_to_live_requests() -> None:
    held = admission(kv_tokens=10_000, window=100_000, live_share=0.5)
    assert (await entered(held, BATCH, 3000, 100)).waits
    job = await entered(held, BATCH, 3000, 100)
    assert not job.waits
    assert (await entered(held, LIVE, 6000, 100)).waits
    assert not job.waits


async def test_a_job_larger_than_the_share_of_jobs_starts_where_no_other_job_runs() -> None:
    held = admission(kv_tokens=10_000, window=100_000, live_share=0.5)
    first = await entered(held, BATCH, 1000)
    await entered(held, LIVE, 1000)
    large = await entered(held, BATCH, 8000)
    assert not large.waits
    first.close()
    assert large.waits


async def test_a_job_starts_when_an_old_forecast_was_all_that_kept_it() -> None:
    held = admission(kv_tokens=10_000, window=100_000)
    ending = [await entered(held, BATCH, 3000) for _ in range(2)]
    await entered(held, BATCH, 3000)
    job = await entered(held, BATCH, 6000)
    for permit in ending:
        permit.close()
    async with asyncio.timeout(5):
        await entering[-1]
    assert job.waits


async def test_jobs_leave_a_share_of_the_slots_to_live_requests() -> None:
    held = admission(slots=4, live_share=0.25, window=100_000)
    for _ in range(3):
        await held.take_job(BATCH)
    assert held.no_room.is_set()
    assert held.take(LIVE) is not None
    assert held.full
    assert held.take(LIVE) is None


@pytest.mark.parametrize(("slots", "share", "jobs"), [(8, 0.25, 6), (1, 0.9, 1), (4, 0.0, 4), (3, 1.0, 1)])
async def test_one_slot_is_always_open_to_jobs(slots: int, share: float, jobs: int) -> None:
    held = admission(slots=slots, live_share=share, window=100_000)
    for _ in range(jobs):
        await held.take_job(BATCH)
    assert held.no_room.is_set()


async def test_a_job_that_was_delivered_gets_the_next_slot_that_is_freed() -> None:
    held = admission(slots=1)
    live = held.take(LIVE)
    assert live is not None
    waiting = asyncio.create_task(held.take_job(BATCH))
    await asyncio.sleep(0)
    assert not waiting.done()
    live.close()
    assert (await waiting).service_class == BATCH
    assert held.busy == 1


async def test_a_cancelled_wait_for_a_slot_takes_none() -> None:
    held = admission(slots=1)
    live = held.take(LIVE)
    assert live is not None
    waiting = asyncio.create_task(held.take_job(BATCH))
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.wait([waiting])
    live.close()
    assert held.busy == 0


async def test_the_prompt_of_several_choices_is_ahead_until_each_has_its_first_token() -> None:
    held = admission(window=100_000)
    permit = await held.take_job(BATCH)
    await permit.enter(100, 10, choices=3)
    assert (permit.tokens, permit.worst, held.window_used) == (300, 330, 300)
    for _ in range(2):
        permit.first_token()
    assert held.window_used == 300
    permit.first_token()
    permit.first_token()
    assert held.window_used == 0


async def test_a_closed_permit_has_no_effect_any_more() -> None:
    held = admission()
    permit = await entered(held, LIVE, 400)
    permit.close()
    permit.close()
    permit.first_token()
    assert (held.busy, held.window_used, held.kv_forecast) == (0, 0, 0)


async def test_the_forecast_grows_with_what_a_request_generates_and_ends_with_it() -> None:
    held = admission()
    permit = await entered(held, BATCH, 400, 100)
    assert held.kv_forecast == 500
    permit.first_token()
    permit.generated(40)
    assert held.kv_forecast == 500
    permit.close()
    assert held.kv_forecast == 0


async def test_an_answer_that_ignores_its_end_counts_with_all_of_its_tokens() -> None:
    held = admission()
    for _ in range(2):
        permit = await held.take_job(BATCH)
        await permit.enter(100, 1000, certain=True)
        permit.first_token()
        permit.generated(900)
    assert held.kv_forecast == 2200


async def test_a_wider_window_lets_waiting_requests_start() -> None:
    held = admission(window=500)
    await entered(held, BATCH, 600)
    job = await entered(held, BATCH, 600)
    assert not job.waits
    held.set_window(2000)
    assert job.waits


async def test_a_permit_tells_how_long_it_waited() -> None:
    now = 5.0
    held = Admission(
        Budget(slots=9, kv_tokens=9_000, window=100, staged=9, live_share=0.0), clock=lambda: now
    )
    first = await entered(held, BATCH, 100)
    second = await entered(held, LIVE, 100)
    third = await entered(held, LIVE, 100)
    now = 7.5
    second.first_token()
    await entering[-1]
    assert (first.waited, second.waited, third.waited) == (0.0, 0.0, 2.5)


async def test_every_change_is_told() -> None:
    seen: list[int] = []
    limits = Budget(slots=2, kv_tokens=9_000, window=100, staged=9, live_share=0.0)
    held = Admission(limits)
    held.on_change(lambda: seen.append(held.busy))
    live = held.take(LIVE)
    assert live is not None
    live.close()
    assert seen == [1, 0]


async def test_what_answers_need_is_learned_from_those_that_ended_and_not_from_cancelled_ones() -> None:
    held = admission()

    async def answered(*, to_its_end: bool) -> None:
        permit = await entered(held, BATCH, 100, 1000)
        permit.first_token()
        permit.generated(10)
        if to_its_end:
            permit.finished()
        permit.close()

    for _ in range(50):
        await answered(to_its_end=False)
    cautious = await entered(held, BATCH, 100, 1000)
    assert held.kv_forecast == 1100
    cautious.close()
    for _ in range(50):
        await answered(to_its_end=True)
    await entered(held, BATCH, 100, 1000)
    assert held.kv_forecast < 300


@pytest.mark.parametrize("service_class", [LIVE, INTERACTIVE, BATCH])
@pytest.mark.parametrize("own", [None, 0, -(10**9), 10**9])
def test_the_class_can_be_read_from_an_engine_priority(service_class: ServiceClass, own: int | None) -> None:
    assert class_of(engine_priority(service_class, own)) == service_class
