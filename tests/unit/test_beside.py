"""The load of `benchmarks.beside`."""

from __future__ import annotations

from statistics import median

import pytest

from benchmarks.beside import FULL
from benchmarks.workload import LONGEST


def sizes(lengths: str, reading: str) -> list[tuple[int, int]]:
    return [(len(body["token_ids"]), body["max_tokens"]) for body in FULL.batch(lengths, reading, 300)]


def test_fixed_lengths_are_fixed() -> None:
    assert set(sizes("fixed", "bare")) == {(512, 128)}


def test_mixed_lengths_lie_around_their_medians() -> None:
    prompts, answers = zip(*sizes("mixed", "bare"), strict=True)
    assert median(prompts) == pytest.approx(512, rel=0.15)
    assert median(answers) == pytest.approx(128, rel=0.15)
    assert max(prompts) <= LONGEST * 512
    assert len(set(prompts)) > 100


def test_every_reading_has_the_same_lengths_and_prompts_of_its_own() -> None:
    assert sizes("mixed", "bare") == sizes("mixed", "both jobs")
    first, second = (FULL.batch("mixed", reading, 20) for reading in ("bare", "both jobs"))
    assert all(a["token_ids"] != b["token_ids"] for a, b in zip(first, second, strict=True))


def test_live_requests_come_at_their_rate() -> None:
    bodies, due = FULL.live_requests("alone", 100.0)
    assert len(bodies) == len(due) == pytest.approx(250, rel=0.3)
    assert due == sorted(due)
