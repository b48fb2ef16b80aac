"""How lines are put into jobs."""

from __future__ import annotations

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from inferbus.schemas.fleet import Load, Role, State, WorkerInfo
from inferbus.workers.batch.bundling import BYTES, LINES, Backlog, pace
from inferbus.workers.batch.lines import Line


def worker(slots: int, *, model: str = "m", role: Role = "both", state: State = "ready") -> WorkerInfo:
    return WorkerInfo(
        worker="w",
        role=role,
        state=state,
        model=model,
        kinds=["chat"],
        tokenizer=True,
        engine="scripted",
        version="0",
        host="h",
        started=0.0,
        load=Load(slots=slots),
    )


def line(number: int, size: int = 10) -> Line:
    body = msgspec.Raw(b'"' + b"x" * size + b'"')
    return Line(number=number, custom_id=str(number), kind="chat", model="m", body=body)


def numbers(lines: list[Line]) -> list[int]:
    return [each.number for each in lines]


def test_the_window_follows_the_workers_that_serve_the_model() -> None:
    found = pace([worker(100), worker(40), worker(9, model="n"), worker(9, role="prefill")], "m")
    assert (found.workers, found.window, found.bundle) == (2, 280, 10)
    assert pace([worker(1)], "m").bundle == 1
    assert pace([worker(4096)], "m").bundle == LINES


def test_without_workers_some_lines_are_submitted_for_the_first_that_comes() -> None:
    assert pace([worker(8, state="starting")], "m").window > 0


@given(sizes=st.lists(st.integers(1, BYTES * 2), max_size=30), most=st.integers(1, 10))
def test_bundles_hold_every_line_once_and_are_bounded(sizes: list[int], most: int) -> None:
    backlog = Backlog(line(number, size) for number, size in enumerate(sizes))
    seen: list[int] = []
    while bundle := backlog.bundle(most):
        assert len(bundle) <= most
        assert len(bundle) == 1 or sum(len(bytes(each.body)) for each in bundle) <= BYTES
        seen += numbers(bundle)
    assert seen == list(range(len(sizes)))
    assert backlog.empty


def test_lines_that_come_back_are_bundled_first() -> None:
    backlog = Backlog(iter([line(3), line(4)]))
    backlog.again.extend([line(1), line(2)])
    assert numbers(backlog.bundle(3)) == [1, 2, 3]


@given(count=st.integers(1, 64), deadly=st.integers(0, 63))
def test_a_line_that_kills_its_workers_is_found_in_halves(count: int, deadly: int) -> None:
    deadly %= count
    backlog = Backlog(iter(()))
    backlog.died([line(number) for number in range(count)], suspect=False)
    kills, answered = 0, list[int]()
    while backlog.suspects:
        lines = backlog.suspects.popleft()
        if deadly not in numbers(lines):
            answered += numbers(lines)
        elif len(lines) > 1:
            kills += 1
            backlog.died(lines, suspect=True)
    assert sorted([*answered, deadly]) == list(range(count))
    assert kills <= 7
