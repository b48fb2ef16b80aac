"""Tables in memory as batches, and their answers beside their rows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import pandas as pd
import pyarrow as pa
import pytest

from inferbus import batch_frame
from inferbus.schemas.errors import InvalidRequest
from inferbus.workers.batch import frames, tables
from inferbus.workers.batch.template import Filling, template

ROWS: list[dict[str, Any]] = [{"q": f"Question {n}", "n": n} for n in range(1, 601)]
MAPPED = {"prompt": "q", "custom_id": "n"}


def line(number: int, **body: Any) -> dict[str, Any]:
    return {"id": f"batch_req_b_{number}", "response": {"status_code": 200, "body": body}, "error": None}


def answered(number: int, **choice: Any) -> dict[str, Any]:
    usage = {"prompt_tokens": number, "completion_tokens": 2}
    return line(number, choices=[{"finish_reason": "stop", **choice}], usage=usage)


@pytest.mark.parametrize("frame", [pd.DataFrame(ROWS), pa.Table.from_pylist(ROWS)], ids=["pandas", "arrow"])
def test_a_frame_has_the_rows_of_a_file(frame: Any) -> None:
    made = template(MAPPED)
    assert list(map(tuple, tables.frame_rows(frame, made.columns))) == [(row["q"], row["n"]) for row in ROWS]


def test_missing_values_of_pandas_are_none_whatever_they_are_called() -> None:
    frame = pd.DataFrame({"q": ["a", None, float("nan"), pd.NA], "n": [1.5, None, float("nan"), 2.0]})
    assert [row[0] for row in tables.frame_rows(frame, ["q"])] == ["a", None, None, None]
    filling = Filling(template({"prompt": "q", "seed": "n"}), ["q", "n"])
    (first, *_) = tables.frame_rows(frame, ["q", "n"])
    assert msgspec.json.decode(filling.line(1, first))["body"]["seed"] == 1.5


def test_columns_that_are_not_asked_for_may_hold_anything() -> None:
    frame = pd.DataFrame({"q": ["a"], 5: [object()]})
    assert list(tables.frame_rows(frame, ["q"])) == [("a",)]
    with pytest.raises(InvalidRequest, match=r"the table: .*object"):
        list(tables.frame_rows(frame, ["5"]))
    with pytest.raises(InvalidRequest, match="no column p; it has q, 5"):
        list(tables.frame_rows(frame, ["p"]))
    with pytest.raises(InvalidRequest, match="no column p; it has q"):
        list(tables.frame_rows(pa.table({"q": ["a"]}), ["p"]))


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What the batch has for three rows, in the order in which they are done."""
    found = [
        answered(3, message={"content": "C"}),
        answered(1, text="A"),
        line(2, error={"code": "context_length_exceeded", "message": "too long"}),
    ]

    def batch(rows: Any, **_options: Any) -> Iterator[dict[str, Any]]:
        yield from found

    monkeypatch.setattr(frames, "batch", batch)
    return found


def test_answers_stand_beside_their_rows(lines: list[dict[str, Any]]) -> None:
    frame = pd.DataFrame({"q": ["a", "b", "c"]}, index=["x", "y", "z"])
    found = batch_frame(frame, {"prompt": "q"}, prefix="llm_")
    assert list(found.columns) == [
        "q", "llm_answer", "llm_finish_reason", "llm_input_tokens", "llm_output_tokens", "llm_error",
    ]  # fmt: skip
    assert list(found.index) == ["x", "y", "z"]
    assert list(found["llm_answer"].fillna("-")) == ["A", "-", "C"]
    assert list(found["llm_error"].fillna("-")) == ["-", "too long", "-"]
    assert list(found["llm_input_tokens"].fillna(0)) == [1, 0, 3]
    assert str(found["llm_input_tokens"].dtype) == "Int64"
    assert list(frame.columns) == ["q"]

    lines[2] = {
        **line(2),
        "response": None,
        "error": {"code": "batch_expired", "message": "its window ended"},
    }
    arrow = batch_frame(pa.table({"q": ["a", "b", "c"]}), {"prompt": "q"}).to_pydict()
    assert arrow == {
        "q": ["a", "b", "c"],
        "answer": ["A", None, "C"],
        "finish_reason": ["stop", None, "stop"],
        "input_tokens": [1, None, 3],
        "output_tokens": [2, None, 2],
        "error": [None, "its window ended", None],
    }


def test_a_stream_of_arrow_is_a_frame_too(lines: list[dict[str, Any]]) -> None:
    found = batch_frame(pa.table({"q": ["a", "b", "c"]}).to_reader(), {"prompt": "q"})
    assert found.to_pydict()["q"] == ["a", "b", "c"]
    with pytest.raises(InvalidRequest, match="the table: "):
        batch_frame("text", {"prompt": "q"})  # type: ignore[arg-type]


def test_a_frame_that_has_answers_already_is_not_overwritten() -> None:
    for frame in (pd.DataFrame({"q": ["a"], "answer": ["b"]}), pa.table({"q": ["a"], "answer": ["b"]})):
        with pytest.raises(InvalidRequest, match="has a column answer already") as caught:
            batch_frame(frame, {"prompt": "q"})
        assert caught.value.param == "answer"
