"""The admission of a worker beside a model of SGLang's scheduler, in virtual time."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inferbus.workers.admission import BATCH, INTERACTIVE, LIVE, Admission, Budget, ServiceClass
from tests.simulation.scheduler import Engine, Request, Spec
from tests.simulation.serving import Shape, Worker
from tests.support.virtual import in_virtual_time

WEIGHTS: Final[Mapping[ServiceClass, int]] = {INTERACTIVE: 4, BATCH: 1}
FIXED: Final = Shape(512, 128, 128)
QUESTION: Final = Shape(512, 64, 64)
MIXED: Final = Spec()
PLAIN: Final = Spec(mixed=False)
SMALL: Final = Spec(kv_tokens=60_000)
"""Whose KV cache is full before its steps are."""


def lengths(count: int, *, seed: int = 1) -> list[Shape]:
    """Jobs whose lengths are lognormal: medians of 512 and 128 tokens."""
    draw, shapes = random.Random(seed), []
    for _ in range(count):
        prompt = max(8, min(6000, round(draw.lognormvariate(6.24, 0.8))))
        answer = max(4, min(1500, round(draw.lognormvariate(4.85, 0.8))))
        shapes.append(Shape(prompt, answer, answer))
    return shapes


def budget(spec: Spec, *, steps: float = 3, slots: int = 1024, live_share: float = 0.15) -> Budget:
    return Budget(
        slots=slots,
        kv_tokens=spec.kv_tokens,
        window=round(steps * spec.chunk),
        staged=spec.chunk,
        live_share=live_share,
    )


def served(
    jobs: Sequence[Shape] | Mapping[ServiceClass, Sequence[Shape]],
    *,
    spec: Spec = MIXED,
    live: Shape = QUESTION,
    rate: float = 0.0,
    **limits: Any,
) -> Worker:
    """A worker that has served these jobs, with live requests beside them at a rate, to the last one."""
    workers = []

    async def program() -> None:
        queues: Mapping[ServiceClass, Sequence[Shape]]
        queues = jobs if isinstance(jobs, Mapping) else {BATCH: jobs}
        worker = Worker(spec, budget(spec, **limits), queues, WEIGHTS)
        workers.append(worker)
        async with running(worker):
            asking = asyncio.create_task(ask(worker, live, rate))
            await worker.take_jobs()
            asking.cancel()
            await worker.settled()
        check_idle(worker)
        assert all(each.last is not None for each in worker.served)

    in_virtual_time(program())
    return workers[0]


@contextlib.asynccontextmanager
async def running(worker: Worker) -> Any:
    task = asyncio.create_task(worker.engine.run())
    yield
    task.cancel()


async def ask(worker: Worker, shape: Shape, rate: float) -> None:
    """Live requests as a Poisson process."""
    draw = random.Random(7)
    while rate:
        await asyncio.sleep(draw.expovariate(rate))
        worker.live(shape)


def check_idle(worker: Worker) -> None:
    """Nothing of any request is left."""
    admission, scheduler = worker.admission, worker.engine.scheduler
    assert (admission.busy, admission.queued, admission.window_used, admission.kv_forecast) == (0, 0, 0, 0)
    assert (admission.full, admission.room.is_set(), admission.no_room.is_set()) == (False, True, False)
    assert scheduler.idle
    assert scheduler.kv_free == worker.engine.spec.kv_tokens


def ends(worker: Worker) -> float:
    """When the last job ended."""
    return max(each.arrived + (each.last or 0.0) for each in worker.served if each.service_class != LIVE)


def at_once(jobs: Sequence[Shape], spec: Spec) -> float:
    """Seconds that the engine alone takes for all of them, handed over as one list."""

    async def program() -> None:
        engine, done = Engine(spec), asyncio.Semaphore(0)
        task = asyncio.create_task(engine.run())
        for shape in jobs:
            request = Request(shape.prompt, shape.answer, shape.allowed, token=done.release)
            engine.send(request)
        for _ in range(sum(shape.answer for shape in jobs)):
            await done.acquire()
        task.cancel()

    return in_virtual_time(program())


SPECS: Final = {"mixed": MIXED, "plain": PLAIN, "small": SMALL, "serial": Spec(overlap=False)}


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
@pytest.mark.parametrize("jobs", [[FIXED] * 500, lengths(500)], ids=["fixed", "lognormal"])
def test_jobs_that_wait_in_the_queue_are_answered_as_fast_as_a_list_that_the_engine_has(
    jobs: list[Shape], spec: Spec
) -> None:
    worker = served(jobs, spec=spec, live_share=0.0)
    assert at_once(jobs, spec) / ends(worker) >= 0.97
    assert worker.engine.scheduler.retractions == 0


PROMPTS: Final = st.integers(200, 1024) | st.integers(200, 6000)
SHAPES: Final = st.builds(lambda prompt, answer: Shape(prompt, answer, answer), PROMPTS, st.integers(1, 300))
ENGINES: Final = st.builds(
    Spec,
    kv_tokens=st.sampled_from([20_000, 60_000, 340_000]),
    chunk=st.sampled_from([1024, 1536, 2048]),
    mixed=st.booleans(),
    overlap=st.booleans(),
)
JOBS: Final = st.lists(SHAPES, min_size=1, max_size=60)


@given(jobs=JOBS, spec=ENGINES, rate=st.sampled_from([0.0, 2.0, 10.0]))
@settings(max_examples=30)
def test_the_engines_own_queue_stays_within_the_window_and_one_prompt(
    jobs: list[Shape], spec: Spec, rate: float
) -> None:
    worker = served(jobs, spec=spec, rate=rate)
    longest = max(shape.prompt for shape in [*jobs, QUESTION])
    # Live requests have a window of their own.
    assert worker.longest_queue <= (2 if rate else 1) * (3 * spec.chunk + longest)


@given(jobs=JOBS, spec=ENGINES)
@settings(max_examples=30)
def test_no_step_has_room_for_a_prompt_while_jobs_are_queued_and_the_kv_cache_has_room(
    jobs: list[Shape], spec: Spec
) -> None:
    worker = served(jobs, spec=msgspec.structs.replace(spec, kv_tokens=1_000_000))
    # The first two begin with the first jobs that come. A prompt of several steps counts as ahead until its
    # last one, so the jobs behind it come late for three.
    assert len(worker.idle_steps) <= 2 + 3 * sum(shape.prompt > spec.chunk for shape in jobs)


@given(jobs=JOBS, spec=ENGINES, live_share=st.sampled_from([0.0, 0.15, 1.0]))
@settings(max_examples=30)
def test_the_kv_cache_is_never_promised_twice_where_answers_have_their_full_length(
    jobs: list[Shape], spec: Spec, live_share: float
) -> None:
    worker = served(jobs, spec=spec, live_share=live_share)
    assert worker.engine.scheduler.retractions == 0


def test_answers_that_stay_short_of_what_they_may_have_make_room_for_more_jobs() -> None:
    jobs = [Shape(512, 128, 2048)] * 600
    worker = served(jobs, spec=SMALL, live_share=0.0)
    assert at_once(jobs, SMALL) / ends(worker) >= 0.97
    promised_in_full = SMALL.kv_tokens // (512 + 2048)
    assert max(step.running for step in worker.steps) > 2 * promised_in_full


@pytest.mark.parametrize("mixed", [True, False], ids=["mixed", "plain"])
def test_answers_that_are_longer_than_was_learned_cost_few_retractions_and_all_end(mixed: bool) -> None:
    jobs = [Shape(64, 64, 1024)] * 400 + [Shape(64, 1023, 1024)] * 200
    spec = Spec(kv_tokens=40_000, mixed=mixed)
    worker = served(jobs, spec=spec, live_share=0.0)
    assert 0 < worker.engine.scheduler.retractions <= 100
    assert at_once(jobs, spec) / ends(worker) >= 0.9


def test_a_prompt_larger_than_the_window_is_answered_and_so_is_everything_behind_it() -> None:
    huge = Shape(30_000, 10, 10)
    worker = served([*[FIXED] * 50, huge, *[FIXED] * 50], rate=2.0)
    assert huge in [each.shape for each in worker.served]
    assert worker.longest_queue <= 2 * 3 * MIXED.chunk + huge.prompt


def test_a_job_larger_than_the_share_of_jobs_is_answered_beside_live_requests() -> None:
    large = Shape(40_000, 100, 100)
    jobs = [*[FIXED] * 20, large, *[FIXED] * 20]
    worker = served(jobs, spec=SMALL, live=Shape(512, 500, 500), rate=5.0, live_share=0.5)
    assert large in [each.shape for each in worker.served]


def test_classes_keep_their_weights_second_by_second() -> None:
    worker = served({INTERACTIVE: [FIXED] * 800, BATCH: [FIXED] * 200})
    begun = [(int(each.arrived + (each.first or 0.0)), each.service_class) for each in worker.served]
    for second in range(1, max(begun)[0] - 1):
        names = Counter(name for when, name in begun if when == second)
        assert 3 <= names[INTERACTIVE] / names[BATCH] <= 5


def test_a_live_request_never_waits_for_a_jobs_prompt_before_it_is_in_the_engine() -> None:
    worker = served(lengths(300), rate=4.0)
    waited = [each.waited for each in worker.served if each.service_class == LIVE]
    assert len(waited) > 20
    assert max(waited) == 0.0


@pytest.mark.parametrize("slots", [64, 1024])
def test_jobs_have_their_turns_beside_more_live_requests_than_the_engine_can_answer(slots: int) -> None:
    async def program() -> None:
        worker = Worker(MIXED, budget(MIXED, slots=slots), {BATCH: [FIXED] * 1000}, WEIGHTS)
        async with running(worker):
            asking = asyncio.create_task(ask(worker, QUESTION, 200.0))
            taking = asyncio.create_task(worker.take_jobs())
            for _ in range(3):
                before = Counter(each.service_class for each in worker.served if each.last is not None)
                await asyncio.sleep(10.0)
                after = Counter(each.service_class for each in worker.served if each.last is not None)
                assert after[BATCH] > before[BATCH]
                assert after[LIVE] > before[LIVE] + 50
            asking.cancel()
            taking.cancel()

    in_virtual_time(program())


class Story(msgspec.Struct, frozen=True):
    """A request: when it comes, and how long it stays at most."""

    service_class: ServiceClass
    arrives: float
    answer: int
    stays: float


STORIES: Final = st.builds(
    Story,
    st.sampled_from([LIVE, INTERACTIVE, BATCH]),
    st.sampled_from([0.0, 0.0002, 0.01, 0.3]),
    st.sampled_from([1, 50, 3000]),
    st.sampled_from([0.0, 0.0002, 0.001, 0.02, 0.2, 1.0, 60.0]),
)


@given(stories=st.lists(STORIES, max_size=40), slots=st.sampled_from([1, 3, 40]))
@settings(max_examples=60)
def test_requests_that_are_cancelled_wherever_they_are_leave_nothing(
    stories: list[Story], slots: int
) -> None:
    async def program() -> None:
        limits = budget(Spec(kv_tokens=8_000, chunk=1024), slots=slots)
        worker = Worker(Spec(kv_tokens=8_000, chunk=1024), limits, {}, WEIGHTS)
        async with running(worker):
            for story in sorted(stories, key=lambda each: each.arrives):
                await asyncio.sleep(story.arrives - asyncio.get_running_loop().time())
                shape = Shape(512, story.answer, story.answer)
                live = story.service_class == LIVE
                task = worker.live(shape) if live else worker.job(story.service_class, shape)
                if task is not None:
                    asyncio.get_running_loop().call_later(story.stays, task.cancel)
            await worker.settled()
        check_idle(worker)
        assert await taken(worker.admission) == await taken(Admission(limits))

    in_virtual_time(program())


async def taken(admission: Admission) -> int:
    """Jobs that it takes before it has no room."""
    count = 0
    while admission.room.is_set():
        await admission.take_job(BATCH)
        count += 1
    return count
