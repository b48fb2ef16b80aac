"""What the client makes of the bytes and headers that it gets."""

from __future__ import annotations

import contextlib
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from inferbus.schemas import codec
from inferbus.schemas.answers import Retrying, TokenAnswer, TokenChoice, TokenChunk, Usage
from inferbus.schemas.errors import (
    CallerError,
    Cancelled,
    DeadlineExceeded,
    ErrorAnswer,
    ErrorBody,
    InfrastructureError,
    InternalError,
    InvalidRequest,
    NoWorker,
)
from inferbus.schemas.headers import Continuation
from inferbus.workers.client.assembler import Assembler
from inferbus.workers.client.deltas import to_answer
from inferbus.workers.client.messages import (
    ChunkMessage,
    EndMark,
    ErrorMessage,
    WholeMessage,
    not_taken,
    parse_message,
    parse_result,
    status_error,
)
from inferbus.workers.client.stream import text
from tests.support.answers import chat, chat_answer

TYPES = [codec.JSON, codec.MSGPACK]
CHUNK = TokenChunk(job="j", attempt=2, seq=3, index=0, token_ids=[1, 2])
ANSWER = TokenAnswer(
    job="j",
    attempt=1,
    choices=[TokenChoice(index=0, token_ids=[1], finish_reason="stop")],
    usage=Usage(prompt_tokens=1, completion_tokens=1, total_tokens=2),
)


@pytest.mark.parametrize("kind", TYPES)
def test_chunks_are_read_in_either_content_type_without_being_told_which(kind: str) -> None:
    assert parse_message(codec.encode(CHUNK, kind), None) == ChunkMessage(attempt=2, seq=3, chunk=CHUNK)
    told = chat({"content": "a"})
    assert parse_message(codec.encode(told, kind), {}) == ChunkMessage(attempt=1, seq=0, chunk=told)


@pytest.mark.parametrize("kind", TYPES)
def test_answers_in_one_piece_are_told_from_chunks(kind: str) -> None:
    assert parse_message(codec.encode(ANSWER, kind), {}) == WholeMessage(attempt=1, answer=ANSWER)
    assert parse_message(codec.encode(chat_answer("a"), kind), {}) == WholeMessage(
        attempt=1, answer=chat_answer("a")
    )


def test_token_ids_beside_text_are_no_concern_of_the_user() -> None:
    told = chat({"content": "a"})
    assert isinstance(told, dict)
    assert parse_message(codec.encode(told | {"token_ids": [7]}), {}) == ChunkMessage(
        attempt=1, seq=0, chunk=told
    )


def test_a_continuation_says_where_it_goes_on() -> None:
    found = parse_message(codec.encode(CHUNK), {"Infer-Continues": "1:37"})
    assert isinstance(found, ChunkMessage)
    assert found.continues == Continuation(1, 37)


def test_an_error_becomes_its_class() -> None:
    body = codec.encode(ErrorAnswer(error=InvalidRequest("no", param="n").body(), job="j", attempt=3))
    found = parse_message(body, {})
    assert isinstance(found, ErrorMessage)
    assert (found.attempt, type(found.error), found.error.param) == (3, InvalidRequest, "n")


@pytest.mark.parametrize(("retryable", "kind"), [(True, InfrastructureError), (False, CallerError)])
def test_an_error_of_a_newer_worker_becomes_its_nearest_class(retryable: bool, kind: type[Exception]) -> None:
    answer = ErrorAnswer(error=ErrorBody(code="new_thing", message="x", retryable=retryable))
    found = parse_message(codec.encode(answer), {})
    assert isinstance(found, ErrorMessage)
    assert isinstance(found.error, kind)


def test_the_end_mark_is_an_empty_body_with_its_headers() -> None:
    found = {"Infer-Status": "ok", "Infer-Chunks": "7", "Infer-Attempt": "2", "Infer-Worker": "d"}
    assert parse_message(b"", found) == EndMark(attempt=2, status="ok", messages=7, worker="d")


def test_nobody_there_is_an_error_that_nothing_follows() -> None:
    found = not_taken()
    assert isinstance(found.error, NoWorker)
    assert found.final


@pytest.mark.parametrize(
    ("body", "found"),
    [
        (b"", {}),
        (b"", {"Infer-Status": "unheard-of"}),
        (codec.encode(Retrying(job="j", attempt=1, retrying=NoWorker("x").body())), {}),
        (b'{"something": "of a newer worker"}', {}),
    ],
)
def test_what_says_nothing_of_the_answer_is_passed_over(body: bytes, found: dict[str, str]) -> None:
    assert parse_message(body, found) is None


@pytest.mark.parametrize(
    "body",
    [
        b"{",
        b"\xc1",
        b"[1]",
        b'{"seq": 0}',
        b'{"choices": 1, "object": "x"}',
        b'{"seq": 0, "choices": [{"delta": 1}]}',
        b'{"error": {"code": 1}}',
    ],
)
def test_what_is_not_of_the_contract_is_an_internal_error(body: bytes) -> None:
    try:
        found = parse_message(body, {})
    except InternalError:
        return
    assert isinstance(found, ErrorMessage)
    assert isinstance(found.error, InternalError)


@given(st.binary(max_size=60), st.dictionaries(st.sampled_from(["Infer-Attempt", "Infer-Chunks"]), st.text()))
def test_no_bytes_raise_anything_else(body: bytes, found: dict[str, str]) -> None:
    with contextlib.suppress(InternalError):
        parse_message(body, found)


@given(
    st.recursive(
        st.none() | st.integers(-5, 5) | st.text(max_size=3), lambda inner: st.lists(inner, max_size=3)
    )
)
def test_no_shape_of_a_chunk_raises_anything_else(value: Any) -> None:
    for field in ("seq", "attempt", "choices", "error", "token_ids", "job"):
        with contextlib.suppress(InternalError):
            parse_message(msgspec.json.encode({"seq": 0, "choices": []} | {field: value}), {})


def test_what_is_of_another_job_is_passed_over() -> None:
    assert parse_message(codec.encode(CHUNK), {}, job="j") is not None
    assert parse_message(codec.encode(CHUNK), {}, job="other") is None
    assert parse_message(b'{"error": {"code": "x", "message": "y", "retryable": false}}', {}, job="j") is None
    assert parse_message(b"", {"Infer-Status": "ok", "Infer-Job-Id": "other"}, job="j") is None


_FIELDS = (
    "index delta message content text tool_calls function arguments logprobs usage finish_reason token_ids "
    "warnings object choices error attempt seq job role"
)
_FIELD = st.sampled_from(_FIELDS.split())
_VALUE = st.recursive(
    st.none() | st.booleans() | st.integers(-1, 2) | st.floats() | st.text(max_size=2),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(_FIELD, inner, max_size=3),
    max_leaves=12,
)
_CHOICES = st.lists(st.dictionaries(_FIELD, _VALUE, max_size=4), max_size=2)


@given(st.lists(st.tuples(st.dictionaries(_FIELD, _VALUE, max_size=4), _CHOICES | _VALUE), max_size=4))
def test_no_sequence_of_messages_raises_anything_but_one_clear_error(
    messages: list[tuple[dict[str, Any], Any]],
) -> None:
    assembler = Assembler()
    with contextlib.suppress(InternalError):
        for seq, (fields, choices) in enumerate(messages):
            body = {"seq": seq, "attempt": 1} | fields | {"choices": choices}
            found = parse_message(msgspec.msgpack.encode(body), {})
            if found is not None:
                for event in assembler.take(found):
                    text(event)
        to_answer(assembler.delivered)


@pytest.mark.parametrize("start", [b'{"seq":0,"choices":', b'{"choices":', b'{"error":'])
def test_what_is_nested_too_deeply_is_one_clear_error(start: bytes) -> None:
    with contextlib.suppress(InternalError):
        parse_message(start + b"[" * 100_000 + b"]" * 100_000 + b"}", {})


def test_a_result_names_its_submission_and_who_answered() -> None:
    found = {"Infer-Status": "ok", "Infer-Submission": "9", "Infer-Worker": "d", "Infer-Prefill-Worker": "p"}
    result = parse_result(codec.encode(ANSWER), found)
    assert (result.answer, result.error) == (ANSWER, None)
    assert (result.status, result.submission, result.worker, result.prefill_worker) == ("ok", 9, "d", "p")


def test_a_result_that_is_a_chunk_is_refused() -> None:
    with pytest.raises(InternalError):
        parse_result(codec.encode(CHUNK), {})


def test_a_status_has_its_error() -> None:
    assert status_error("ok") is None
    assert isinstance(status_error("cancelled"), Cancelled)
    assert isinstance(status_error("expired"), DeadlineExceeded)
    assert isinstance(status_error("error"), InternalError)


def test_the_text_of_a_chunk_and_of_a_whole_answer_is_had_alike() -> None:
    choices = [{"index": 0, "message": {"role": "assistant", "content": "Hi"}}]
    assert text({"choices": choices}) == "Hi"
    assert text({"choices": [{"index": 0, "delta": {"content": "Hi"}}]}) == "Hi"
    assert text({"choices": [{"index": 0, "text": "Hi"}]}) == "Hi"
    assert text({"choices": choices}, index=1) == ""
