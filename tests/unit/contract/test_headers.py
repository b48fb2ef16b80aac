"""Deadlines and continuations, as headers say them."""

from __future__ import annotations

import datetime as dt

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from inferbus.schemas import headers, limits
from inferbus.schemas.errors import InvalidRequest
from inferbus.schemas.headers import Continuation, parse_continues, parse_deadline

ARRIVED = dt.datetime(2026, 1, 1, tzinfo=dt.UTC)


@pytest.mark.parametrize(
    ("text", "value"),
    [("0", 0), ("17", 17), ("9" * 18, 10**18 - 1), ("9" * 5000, None), ("", None), ("-1", None), ("٣", None)],
)
def test_a_number_in_a_header_is_read_or_left_out(text: str, value: int | None) -> None:
    assert headers.number({headers.ATTEMPT: text}, headers.ATTEMPT) == value
    assert headers.number(None, headers.ATTEMPT) is None


def deadline(text: str) -> dt.datetime | None:
    return parse_deadline({headers.DEADLINE: text}, arrived=ARRIVED)


@pytest.mark.parametrize("found", [None, {}, {headers.DEADLINE: ""}])
def test_without_the_header_there_is_no_deadline(found: dict[str, str] | None) -> None:
    assert parse_deadline(found, arrived=ARRIVED) is None


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("30", 30.0),
        ("0.5", 0.5),
        ("1e2", 100.0),
        ("2026-01-01T00:01:00Z", 60.0),
        ("2026-01-01T01:01:00+01:00", 60.0),
        ("2025-12-31T23:59:00Z", -60.0),
        ("2026-01-01t00:01:00z", 60.0),
        ("2026-01-01 00:01:00.5Z", 60.5),
        ("2026-01-01T00:01:00-00:00", 60.0),
        ("2026-01-01T00:00:60Z", 60.0),
        ("2026-01-01T00:00:60.250Z", 60.25),
        ("0001-01-01T00:00:00+23:59", None),
    ],
)
def test_a_deadline_is_seconds_from_arrival_or_a_moment(text: str, seconds: float | None) -> None:
    moment = deadline(text)
    assert moment is not None
    if seconds is None:
        assert moment < ARRIVED
    else:
        assert (moment - ARRIVED).total_seconds() == seconds


@pytest.mark.parametrize(
    "text",
    [
        "0",
        "-1",
        "nan",
        "inf",
        "-inf",
        "1e999",
        str(limits.DEADLINE_SECONDS + 1),
        "9999-12-31T23:59:59Z",
        "2026-01-01T00:01:00",
        "2026-01-01",
        "soon",
        "2026-13-01T00:00:00Z",
    ],
)
def test_anything_else_is_no_deadline(text: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        deadline(text)
    assert caught.value.param == headers.DEADLINE
    assert text not in caught.value.message or len(text) < 3


@given(st.text(max_size=40))
@example("9999-12-31T23:59:59-23:59")
@example("0001-01-01T00:00:00+14:00")
def test_arbitrary_deadlines_never_raise_outside_the_error_tree(text: str) -> None:
    try:
        moment = deadline(text)
    except InvalidRequest:
        return
    assert moment is None or moment.tzinfo is not None


def test_a_continuation_survives_its_header() -> None:
    continuation = Continuation(attempt=2, chunks=17)
    assert parse_continues({headers.CONTINUES: str(continuation)}) == continuation


@pytest.mark.parametrize("text", ["", "1", "1:", ":1", "-1:2", "1:2:3", "1:" + "9" * 10, "a:b"])
def test_an_unreadable_continuation_is_none(text: str) -> None:
    assert parse_continues({headers.CONTINUES: text}) is None
