"""The order in which lines are sent."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from inferbus.schemas.subjects import Kind
from inferbus.workers.batch import grouping
from inferbus.workers.batch.grouping import grouped
from inferbus.workers.batch.lines import Line


def line(number: int, kind: Kind = "chat", **body: object) -> Line:
    return Line(
        number=number, custom_id=str(number), kind=kind, model="m", body=msgspec.Raw(json.dumps(body))
    )


def system(number: int, which: str) -> Line:
    messages = [{"role": "system", "content": which}, {"role": "user", "content": f"question {number}"}]
    return line(number, model="m", seed=number, messages=messages)


def test_lines_with_one_system_prompt_are_neighbours_whatever_stands_before_it() -> None:
    sent = list(grouped(system(n, "abc"[n % 3] * 50) for n in range(30)))
    assert [each.number % 3 for each in sent] == [0] * 10 + [1] * 10 + [2] * 10


def test_lines_that_say_the_same_keep_their_order() -> None:
    lines = [line(n, "tokens", token_ids=[1, 2]) for n in range(9)]
    assert [each.number for each in grouped(iter(lines))] == list(range(9))


@given(st.lists(st.text(max_size=3), max_size=3 * 7))
def test_every_line_is_sent_once_and_near_its_place(prompts: list[str]) -> None:
    lines = [line(n, "completions", prompt=text) for n, text in enumerate(prompts)]
    sent = list(grouped(iter(lines), most=7))
    assert Counter(each.number for each in sent) == Counter(range(len(prompts)))
    assert all(each.number // 7 == place // 7 for place, each in enumerate(sent))


def test_large_bodies_make_short_stretches() -> None:
    taken = 0

    def lines() -> Iterator[Line]:
        nonlocal taken
        for number in range(20):
            taken += 1
            yield line(number, "completions", prompt="x" * (grouping.BYTES // 2))

    next(grouped(lines()))
    assert taken == 2
