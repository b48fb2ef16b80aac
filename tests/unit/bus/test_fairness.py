"""Weighted turns between classes of jobs."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inferbus.workers.bus.queue.fairness import Fair


def turns(fair: Fair, jobs: dict[str, int], count: int) -> list[str]:
    """Who gets `count` turns, when each class has so many jobs."""
    got = []
    for _ in range(count):
        for name in fair.order():
            if jobs.get(name):
                jobs[name] -= 1
                fair.picked(name)
                got.append(name)
                break
            fair.empty(name)
    return got


@pytest.mark.parametrize(
    "weights", [{"a": 4, "b": 1}, {"a": 1, "b": 1}, {"a": 3, "b": 2}, {"a": 9, "b": 3, "c": 1}]
)
def test_turns_follow_the_weights(weights: dict[str, int]) -> None:
    total = sum(weights.values())
    got = turns(Fair(weights), dict.fromkeys(weights, 10_000), 10 * total)
    for name, weight in weights.items():
        assert abs(got.count(name) - 10 * weight) <= 1


@given(
    st.dictionaries(st.sampled_from("abc"), st.integers(1, 20), min_size=2),
    st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 50)), max_size=20),
)
def test_whatever_came_before_no_class_waits_longer_than_all_weights_together(
    weights: dict[str, int], past: list[tuple[str, int]]
) -> None:
    fair = Fair(weights)
    for name, count in past:
        turns(fair, {name: count}, count)
    bound = 3 * sum(weights.values())
    got = turns(fair, dict.fromkeys(weights, 10_000), bound)
    assert set(got) == set(weights)


def test_a_class_gathers_no_credit_while_it_has_no_jobs() -> None:
    fair = Fair({"a": 4, "b": 1})
    turns(fair, {"b": 1000}, 1000)
    got = turns(fair, {"a": 1000, "b": 1000}, 50)
    assert got.count("a") in range(38, 44)
