"""Which patterns are taken, and that what is taken runs in linear time whatever it is run on."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inferbus.workers.engine.sglang import patterns
from inferbus.workers.engine.sglang.patterns import PatternRefused, cost

_parser: Any = importlib.import_module("re._parser")

TAKEN = {
    r"\n\n": 2,
    r"\n{2,5}": 5,
    r"[.!?]\s{0,4}$": 5,
    r"Step \d{1,3}:": 9,
    r"(\d{1,3}\.){3}\d{1,3}": 15,
    r"^\d{4}-\d{2}-\d{2}$": 10,
    r"yes|no|maybe": 5,
    r"[ab]{2,4}": 4,
    r".{0,256}": 256,
    r"(?:ab|ac)x": 3,
    r"a??b": 2,
    "ď🏳️‍🌈世 é漢字 😀": 12,
    r"\w+( \w+){0,30}": None,
    r"(\w+\s){0,20}": None,
    r'"[^"]*"(,"[^"]*")*': None,
    r"-?\d+(\.\d+)?([eE][+-]?\d+)?": None,
    r"(?:\s|\S)*": None,
}
"""Patterns of ordinary requests, with their longest match."""

AMBIGUOUS = (
    r"(?:.|.)*\Z.",
    r"(a*)*b",
    r"(a+)+b",
    r"(a*b*)*c",
    r"(a|aa)*",
    r"(.{0,10}){0,10}",
    r"(.{0,10})*",
    r"(.?.?)*",
    r"(\w+ ?){0,30}",
    r"(.*a){0,20}",
    r"(a?){50}",
    r"(?:|)(?:|)(?:|)x",
    r"(a?)?",
    r"(){1000000000}",
    r"((((){99}){99}){99}){99}",
    r"\s*\s*\s*\s*x",
)
REFUSED = (
    "(",
    "a{2}{3}",
    r"\p{L}",
    "(?=a)b",
    "(?<!a)b",
    r"(a)\1",
    "(a)?(?(1)b|c)",
    "(?>a)b",
    "a*+b",
    "(?i)a",
    "(?i:a)b",
    "a{1000000000}",
    "(a{1,500}){1,500}",
    "(" * 200 + "a" + ")+" * 200,
    "(" * 2000 + ")" * 2000,
    "a" * 5000,
)


@pytest.mark.parametrize(("pattern", "longest"), TAKEN.items())
def test_an_ordinary_pattern_is_taken_and_its_longest_match_is_known(pattern: str, longest: int) -> None:
    assert cost(pattern).longest == longest


@pytest.mark.parametrize("pattern", AMBIGUOUS)
def test_a_pattern_that_could_backtrack_without_bound_is_refused(pattern: str) -> None:
    with pytest.raises(PatternRefused, match="ambiguous"):
        cost(pattern)


@pytest.mark.parametrize("pattern", REFUSED, ids=lambda pattern: pattern[:20])
def test_what_is_no_small_regular_expression_is_refused(pattern: str) -> None:
    with pytest.raises(PatternRefused) as caught:
        cost(pattern)
    assert pattern not in str(caught.value)


def test_a_pattern_of_many_alternatives_at_every_position_is_refused() -> None:
    words = "|".join(letter + "x" for letter in "abcdefgh")
    assert cost(f"(?:{words})").longest == 2
    assert cost("".join(f"{letter}?" for letter in "abcdefghij")).longest == 10
    with pytest.raises(PatternRefused, match="alternatives"):
        cost("".join(f"{chr(letter)}?" for letter in range(1000, 1100)))


def test_a_class_of_the_two_engines_is_the_larger_of_both() -> None:
    for pattern in (r"(?:\wx|éy)*", r"(?:\Wx|éy)*", r"(?:[^\w]x|éy)*"):
        with pytest.raises(PatternRefused, match="ambiguous"):
            cost(pattern)
    assert cost(r"(?:\wx|\sy)*").positions == 4
    assert cost(r"(?:[^\s]x| y)*").positions == 4


class Attempt:
    """An attempt of a backtracking matcher that follows every way to match, and counts its tries."""

    def __init__(self, pattern: str, text: str) -> None:
        self._text = text
        self.tries = 0
        for start in range(len(text) + 1):
            for _ in self._sequence(list(_parser.parse(pattern)), start):
                pass

    def _sequence(self, items: list[Any], at: int) -> Iterator[int]:
        if not items:
            yield at
            return
        kind, value = items[0]
        for end in self._item(kind, value, at):
            yield from self._sequence(items[1:], end)

    def _item(self, kind: Any, value: Any, at: int) -> Iterator[int]:
        match str(kind):
            case "SUBPATTERN":
                yield from self._sequence(list(value[3]), at)
            case "BRANCH":
                for branch in value[1]:
                    yield from self._sequence(list(branch), at)
            case "MAX_REPEAT" | "MIN_REPEAT":
                least, most, items = value
                yield from self._repeat(least, most, items, at, 0)
            case "AT":
                yield at
            case _:
                self.tries += 1
                accepted = patterns._accepted(kind, tuple(value) if str(kind) == "IN" else value)
                if at < len(self._text) and any(low <= ord(self._text[at]) <= high for low, high in accepted):
                    yield at + 1

    def _repeat(self, least: int, most: Any, items: Any, at: int, done: int) -> Iterator[int]:
        if done < most:
            for end in self._sequence(list(items), at):
                yield from self._repeat(least, most, items, end, done + 1)
        if done >= least:
            yield at


def test_the_counting_matcher_sees_what_goes_wrong_with_ambiguous_patterns() -> None:
    assert Attempt(r"(?:.|.){0,12}c", "a" * 12).tries > 2**12


PIECES = st.recursive(
    st.sampled_from(["a", "b", "[ab]", "[^a]", ".", r"\w", "^", "$", ""]),
    lambda inner: st.one_of(
        st.tuples(inner, inner).map("".join),
        st.tuples(inner, inner).map(lambda pair: f"(?:{pair[0]}|{pair[1]})"),
        st.tuples(inner, st.sampled_from(["*", "+", "?", "{2}", "{0,2}", "{1,3}", "{2,}", "*?"])).map(
            lambda pair: f"(?:{pair[0]}){pair[1]}"
        ),
    ),
    max_leaves=6,
)


@settings(max_examples=1500)
@given(PIECES, st.text("ab ", max_size=12))
def test_an_accepted_pattern_tries_no_place_of_a_text_twice(pattern: str, text: str) -> None:
    try:
        taken = cost(pattern)
    except PatternRefused:
        return
    starts = len(text) + 1
    tries = Attempt(pattern, text).tries
    if taken.longest is None:
        assert tries <= starts * starts * taken.steps
    else:
        assert tries <= starts * taken.steps
        found = re.search(pattern, text)
        assert found is None or len(found[0]) <= taken.longest
