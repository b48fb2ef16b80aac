"""What the benchmark on a GPU asks is the same for every layout, whichever process asks it."""

from __future__ import annotations

import msgspec
import pytest

from benchmarks.load import LoadFailed, Sent
from benchmarks.readings import Item, Taken
from benchmarks.workload import Plan

PLAN = Plan(passes=1, shapes=[], prompt=4, answer=3)
ITEMS = [
    Item(what="whole", requests=3),
    Item(what="jobs", requests=3),
    Item(what="streams", concurrency=2, requests=3),
    Item(what="streams", kind="chat", concurrency=2, requests=3),
    Item(what="paced", requests=30, rate=20),
]


@pytest.mark.parametrize("item", ITEMS, ids=Item.label)
def test_another_process_asks_the_same(item: Item) -> None:
    other = msgspec.json.decode(msgspec.json.encode(item), type=Item)
    assert other.bodies(PLAN, 1) == item.bodies(PLAN, 1)
    if item.what == "paced":
        assert other.due(1) == item.due(1)


def test_no_two_readings_ask_the_same() -> None:
    prompts = [str(body) for item in ITEMS for number in (0, 1) for body in item.bodies(PLAN, number)]
    assert len(set(prompts)) == len(prompts)


def test_figures_of_paced_requests_are_of_whole_answers_and_tell_of_the_others() -> None:
    ok = Sent(due=1.0, sent=1.5, moments=[2.0, 3.0, 5.0], fate="ok")
    taken = Taken.of([ok, Sent(due=2.0, sent=2.0, moments=[2.5], fate="silent")], 3)
    found = taken.reading("single", "both", ITEMS[-1], 0, 3)
    assert (found.seconds, found.rate, found.messages, found.failed) == (5.0, 0.6, 3, {"silent": 1})
    assert found.first is not None
    assert found.first.p50 == 1000
    with pytest.raises(LoadFailed, match="silent"):
        Taken.of([Sent(due=0.0, fate="silent")], 3)
