"""Where a job can be gone on from, from what the stream still holds of earlier attempts."""

from __future__ import annotations

import datetime as dt
import json
from typing import Any

import msgspec
import pytest

from inferbus.schemas import headers
from inferbus.schemas.headers import Continuation
from inferbus.workers.bus.interface import Stored
from inferbus.workers.jobs.history import resume_points

NOW = dt.datetime(2026, 1, 1, tzinfo=dt.UTC)


def message(
    body: dict[str, Any] | None,
    *,
    submission: int = 7,
    msgpack: bool = False,
    found: dict[str, str] | None = None,
) -> Stored:
    encode = msgspec.msgpack.encode if msgpack else msgspec.json.encode
    return Stored(
        subject="infer.stream.acme.j",
        data=encode(body) if body is not None else b"",
        headers={headers.SUBMISSION: str(submission), **(found or {})},
        sequence=1,
        time=NOW,
    )


@pytest.mark.parametrize(
    "odd",
    [
        b"[1,2]",
        b'{"attempt":null,"seq":0,"token_ids":[5]}',
        b'{"attempt":1,"seq":"0","token_ids":[5]}',
        b'{"attempt":1,"seq":0,"token_ids":{"a":1}}',
        b'{"attempt":1,"seq":0,"token_ids":["x"]}',
        b'{"attempt":1,"seq":0,"choices":[null]}',
        b'{"attempt":1,"seq":0,"choices":[{"delta":{"content":{}}}]}',
        b'{"attempt":1,"seq":0,"x":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b"\x91" * 100_000,
        b"\xff\xfe",
        b'{"stream":"INFER_JOBS","seq":5}',
    ],
)
def test_whatever_else_is_on_a_jobs_subject_is_passed_over(odd: bytes) -> None:
    stored = [msgspec.structs.replace(message({}), data=odd), message(tokens(1, 0, 5))]
    for order in (stored, stored[::-1]):
        points = resume_points(order, submission=7, before=2)
        assert [point.token_ids for point in points] in ([[5]], [])


def test_a_chunk_that_the_server_forwarded_for_somebody_is_passed_over() -> None:
    forged = msgspec.structs.replace(message(tokens(1, 0, 666)), forwarded=True)
    points = resume_points([forged, message(tokens(1, 0, 5))], submission=7, before=2)
    assert [point.token_ids for point in points] == [[5]]


def tokens(attempt: int, seq: int, *ids: int, **more: Any) -> dict[str, Any]:
    return {"job": "j", "attempt": attempt, "seq": seq, "index": 0, "token_ids": list(ids), **more}


def chat(attempt: int, seq: int, text: str | None, ids: list[int], **choice: Any) -> dict[str, Any]:
    delta = {"content": text} if text is not None else {"role": "assistant", "content": ""}
    choices = [{"index": 0, "delta": delta, "finish_reason": None, "logprobs": None, **choice}]
    return {"job": "j", "attempt": attempt, "seq": seq, "token_ids": ids, "choices": choices}


def test_the_latest_place_comes_first() -> None:
    stored = [message(tokens(1, 0, 5)), message(tokens(1, 1, 6, 7))]
    found = resume_points(stored, submission=7, before=2)
    assert [(point.after, point.token_ids) for point in found] == [
        (Continuation(1, 2), [5, 6, 7]),
        (Continuation(1, 1), [5]),
    ]


def test_text_chunks_carry_their_text_and_the_role_chunk_has_none() -> None:
    stored = [message(chat(1, 0, None, [5])), message(chat(1, 1, "Par", [])), message(chat(1, 2, "is", [6]))]
    found = resume_points(stored, submission=7, before=2)
    assert [(point.text, point.token_ids) for point in found] == [("Paris", [5, 6]), ("Par", [5]), ("", [5])]


def test_msgpack_chunks_are_read_too() -> None:
    assert resume_points([message(tokens(1, 0, 5), msgpack=True)], submission=7, before=2)


def test_a_hole_ends_what_can_be_gone_on_from() -> None:
    stored = [message(tokens(1, 0, 5)), message(tokens(1, 2, 7))]
    assert [point.token_ids for point in resume_points(stored, submission=7, before=2)] == [[5]]


def test_an_attempt_whose_beginning_is_lost_is_no_place() -> None:
    assert resume_points([message(tokens(1, 1, 5))], submission=7, before=2) == []


def test_a_chain_of_attempts_is_followed() -> None:
    stored = [
        message(tokens(1, 0, 5)),
        message(tokens(1, 1, 6)),
        message(tokens(1, 2, 99)),
        message(tokens(2, 0, 7), found={headers.CONTINUES: "1:2"}),
    ]
    found = resume_points(stored, submission=7, before=3)
    assert (found[0].after, found[0].token_ids) == (Continuation(2, 1), [5, 6, 7])


def test_a_chain_whose_older_part_is_gone_is_no_place() -> None:
    stored = [message(tokens(1, 0, 5)), message(tokens(2, 0, 7), found={headers.CONTINUES: "1:2"})]
    assert resume_points(stored, submission=7, before=3) == []


def test_the_newest_attempt_that_said_anything_counts() -> None:
    stored = [message(tokens(1, 0, 5)), message(tokens(2, 0, 8))]
    assert [point.token_ids for point in resume_points(stored, submission=7, before=3)] == [[8]]


def test_chunks_of_other_submissions_and_of_this_attempt_itself_do_not_count() -> None:
    stored = [message(tokens(1, 0, 5), submission=6), message(tokens(2, 0, 5))]
    assert resume_points(stored, submission=7, before=2) == []


def test_what_had_finished_or_says_more_than_text_is_no_place() -> None:
    finished = [message(tokens(1, 0, 5, finish_reason="stop"))]
    reasoning = [
        message(chat(1, 0, "x", [5])),
        message(chat(1, 1, None, [6], delta={"reasoning_content": "hm"})),
    ]
    logprobs = [message(tokens(1, 0, 5, logprobs={"logprobs": [-1.0]}))]
    second = [message(tokens(1, 0, 5) | {"index": 1})]
    for stored in (finished, reasoning, logprobs, second):
        assert resume_points(stored, submission=7, before=2) == []


def test_end_marks_events_and_nonsense_are_passed_over() -> None:
    nonsense = Stored(subject="s", data=b"\xc1", headers={headers.SUBMISSION: "7"}, sequence=1, time=NOW)
    event = message({"job": "j", "attempt": 1, "retrying": {"code": "draining"}})
    stored = [message(tokens(1, 0, 5)), event, message(None), nonsense, message(json.loads("[]") or {})]
    assert len(resume_points(stored, submission=7, before=2)) == 1


@pytest.mark.parametrize(
    "change",
    [
        {"attempt": None},
        {"attempt": "1"},
        {"attempt": 0},
        {"seq": -1},
        {"seq": None},
        {"token_ids": [None]},
        {"token_ids": "ab"},
        {"choices": [None]},
        {"choices": [{"delta": 1}]},
        {"choices": [{"text": 1}]},
        {"index": "0"},
    ],
)
@pytest.mark.parametrize("msgpack", [False, True])
def test_a_stored_chunk_that_no_worker_sends_is_passed_over(change: dict[str, Any], msgpack: bool) -> None:
    stored = [message(tokens(1, 0, 5)), message(tokens(1, 1, 6) | change, msgpack=msgpack)]
    found = resume_points(stored, submission=7, before=2)
    assert [point.token_ids for point in found] == [[5]]


def test_a_chunk_that_is_nested_without_end_is_passed_over() -> None:
    deep = Stored(
        subject="infer.stream.acme.j",
        data=b'{"attempt":1,"seq":1,"logprobs":' + b"[" * 50_000,
        headers={headers.SUBMISSION: "7"},
        sequence=1,
        time=NOW,
    )
    assert len(resume_points([message(tokens(1, 0, 5)), deep], submission=7, before=2)) == 1


def test_a_chain_of_very_many_attempts_is_followed() -> None:
    stored = [message(tokens(1, 0, 5))] + [
        message(tokens(n, 0, 5), found={headers.CONTINUES: f"{n - 1}:1"}) for n in range(2, 3_000)
    ]
    [latest, *_] = resume_points(stored, submission=7, before=3_000)
    assert latest.token_ids == [5] * 2_999
