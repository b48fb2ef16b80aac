"""What a worker may hold, and how SGLang's scheduler is started for it."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from inferbus.schemas.fleet import Capacity, Role
from inferbus.workers.config import WorkerSettings
from inferbus.workers.engine.sglang import scheduling
from inferbus.workers.roles.budget import budget

CAPACITY = Capacity(
    context_length=4096,
    kv_tokens=10_000,
    page_size=1,
    max_running=32,
    max_prefill_tokens=4096,
    vocabulary=100,
    step_tokens=500,
)


def test_the_engine_bounds_what_is_held_where_the_settings_do_not() -> None:
    held = budget("both", CAPACITY, WorkerSettings())
    assert (held.slots, held.kv_tokens) == (32, 10_000)
    assert budget("both", CAPACITY, WorkerSettings(slots=7)).slots == 7


@pytest.mark.parametrize("role", ["both", "prefill", "decode"])
def test_the_window_is_some_steps_of_the_engine_or_what_the_settings_say(role: Role) -> None:
    steps = budget(role, CAPACITY, WorkerSettings()).window / CAPACITY.step_tokens
    assert steps == int(steps) >= 2
    assert budget(role, CAPACITY, WorkerSettings(prompt_window=77)).window == 77


def test_a_worker_that_does_not_tell_its_step_is_taken_by_its_prefill_batch() -> None:
    older = msgspec.structs.replace(CAPACITY, step_tokens=0)
    assert budget("both", older, WorkerSettings()).window % older.max_prefill_tokens == 0


@pytest.mark.parametrize("role", ["both", "prefill", "decode"])
@pytest.mark.parametrize("gpu", [True, False])
def test_engines_know_priorities_and_only_on_a_gpu_have_short_steps(role: Role, gpu: bool) -> None:
    values = scheduling.defaults(role, {}, gpu=gpu)
    assert values["enable_priority_scheduling"] is True
    assert ("chunked_prefill_size" in values) == (gpu and role != "decode")
    assert ("enable_mixed_chunk" in values) == (gpu and role == "both")


@pytest.mark.parametrize(
    ("given", "left_out"),
    [
        ({"schedule_policy": "lpm"}, "enable_priority_scheduling"),
        ({"chunked_prefill_size": -1}, "enable_mixed_chunk"),
        ({"speculative_algorithm": "EAGLE"}, "enable_mixed_chunk"),
    ],
)
def test_what_does_not_go_with_the_users_own_flags_is_left_out(given: dict[str, Any], left_out: str) -> None:
    assert left_out not in scheduling.defaults("both", given, gpu=True)
