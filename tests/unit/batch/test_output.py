"""The output files: what they hold says what is done."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from inferbus.schemas.errors import ErrorBody
from inferbus.workers.batch.errors import BatchHeld, OutputFailed
from inferbus.workers.batch.output import Output, answer_line, error_line
from tests.support.batches import read

BODY = b'{"usage":{"prompt_tokens":3,"completion_tokens":2,"prompt_tokens_details":{"cached_tokens":1}}}'


def opened(folder: Path) -> Output:
    output = Output(folder / "out.jsonl", folder / "err.jsonl")
    output.open()
    return output


def answer(output: Output, number: int) -> bool:
    line = answer_line("b", number, f"id-{number}", "job", BODY)
    return output.answered(number, line, json.loads(BODY)["usage"])


def fail(output: Output, number: int, error: ErrorBody | str) -> bool:
    line = error_line("b", number, f"id-{number}", "job", error)
    return output.failed(number, line, error if isinstance(error, str) else None)


def close(output: Output) -> None:
    output.write(output.take())
    output.close()


def test_lines_have_openais_fields(tmp_path: Path) -> None:
    output = opened(tmp_path)
    answer(output, 1)
    fail(output, 2, ErrorBody(code="context_length_exceeded", message="too long"))
    fail(output, 3, ErrorBody(code="attempts_exhausted", message="its workers died"))
    fail(output, 4, "batch_expired")
    output.write(output.take())
    output.finish(ordered=False)
    (done,) = read(tmp_path / "out.jsonl")
    assert done == {
        "id": "batch_req_b_1",
        "custom_id": "id-1",
        "response": {"status_code": 200, "request_id": "job", "body": json.loads(BODY)},
        "error": None,
    }
    long, died, expired = read(tmp_path / "err.jsonl")
    assert (long["response"]["status_code"], long["error"]) == (400, None)
    assert long["response"]["body"]["error"]["code"] == "context_length_exceeded"
    assert died["response"]["status_code"] == 500
    assert (expired["response"], expired["error"]["code"]) == (None, "batch_expired")


def test_a_line_is_written_once(tmp_path: Path) -> None:
    output = opened(tmp_path)
    assert answer(output, 1)
    assert not answer(output, 1)
    assert not fail(output, 1, "batch_cancelled")
    close(output)
    assert len(read(tmp_path / "out.jsonl.partial")) == 1


def test_what_was_written_is_known_again_with_its_counts_and_tokens(tmp_path: Path) -> None:
    first = opened(tmp_path)
    answer(first, 1)
    fail(first, 2, "batch_cancelled")
    fail(first, 4, ErrorBody(code="invalid_request", message="no"))
    close(first)
    again = opened(tmp_path)
    assert [number in again.done for number in range(1, 6)] == [True, True, False, True, False]
    assert (again.counts, again.usage) == (first.counts, first.usage)
    assert (again.usage.input_tokens, again.usage.cached_tokens, again.usage.output_tokens) == (3, 1, 2)
    again.close()


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow], max_examples=50)
@given(data=st.data())
def test_a_crash_at_any_byte_costs_only_the_line_that_was_not_whole(tmp_path: Path, data: Any) -> None:
    for path in tmp_path.iterdir():
        path.unlink()
    output = opened(tmp_path)
    for number in range(1, 6):
        answer(output, number)
    close(output)
    partial = tmp_path / "out.jsonl.partial"
    whole = partial.read_bytes()
    end = data.draw(st.integers(0, len(whole)))
    partial.write_bytes(whole[:end])
    again = opened(tmp_path)
    assert again.done.count == whole[:end].count(b"\n")
    for number in range(1, 6):
        answer(again, number)
    close(again)
    assert partial.read_bytes() == whole


def test_finished_files_have_their_names_and_empty_ones_are_not_left(tmp_path: Path) -> None:
    output = opened(tmp_path)
    answer(output, 1)
    output.write(output.take())
    output.finish(ordered=False)
    assert [path.name for path in tmp_path.iterdir()] == ["out.jsonl"]


@given(numbers=st.permutations(range(1, 12)))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow], max_examples=30)
def test_an_ordered_output_is_in_the_order_of_the_input(tmp_path: Path, numbers: list[int]) -> None:
    for path in tmp_path.iterdir():
        path.unlink()
    output = opened(tmp_path)
    for number in numbers:
        answer(output, number)
    output.write(output.take())
    output.finish(ordered=True)
    assert [each["custom_id"] for each in read(tmp_path / "out.jsonl")] == [f"id-{n}" for n in range(1, 12)]


def test_a_finished_output_is_opened_again_with_its_lines(tmp_path: Path) -> None:
    output = opened(tmp_path)
    answer(output, 1)
    output.write(output.take())
    output.finish(ordered=False)
    again = opened(tmp_path)
    assert 1 in again.done
    again.close()


def test_files_that_another_process_writes_are_refused(tmp_path: Path) -> None:
    output = opened(tmp_path)
    with pytest.raises(BatchHeld):
        opened(tmp_path)
    output.close()
    opened(tmp_path).close()


def test_a_file_of_something_else_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    for text in ('{"my": "data"}\n', '{"my": "data"}'):
        (tmp_path / "out.jsonl").write_text(text)
        with pytest.raises(OutputFailed, match="no output of a batch"):
            opened(tmp_path)
        assert [path.name for path in tmp_path.iterdir()] == ["out.jsonl"]
        assert (tmp_path / "out.jsonl").read_text() == text
