"""Reading and checking batch files."""

from __future__ import annotations

import codecs
import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from inferbus.workers.batch.lines import Expected
from inferbus.workers.batch.reading import numbered
from inferbus.workers.batch.validation import Validation, validate
from tests.support.batches import line, write

CHAT = {
    "custom_id": "a",
    "method": "POST",
    "url": "/v1/chat/completions",
    "body": {"model": "m", "messages": []},
}


def checked(tmp_path: Path, *lines: dict[str, Any] | str, **expected: Any) -> Validation:
    return validate(write(tmp_path / "in.jsonl", lines), Expected(**expected))


def problems(found: Validation) -> list[tuple[int | None, str]]:
    return [(each.line, each.code) for each in found.problems]


def test_a_sound_file_says_what_its_lines_have_in_common(tmp_path: Path) -> None:
    found = checked(tmp_path, CHAT, CHAT | {"custom_id": "b"})
    assert (found.total, found.problems) == (2, [])
    assert (found.expected.kind, found.expected.model) == ("chat", "m")


def test_lines_may_name_adapters_of_one_model(tmp_path: Path) -> None:
    def named(*models: str) -> list[dict[str, Any]]:
        return [CHAT | {"custom_id": str(n), "body": {"model": model}} for n, model in enumerate(models)]

    found = checked(tmp_path, *named("m", "m:blue", "m:red"))
    assert (found.problems, found.expected.model) == ([], "m")
    # Whether the first name is a model's or an adapter's, the workers that are there say.
    found = checked(tmp_path, *named("m:blue", "m", "m:red"), served=("m", "m:blue:s", "n"))
    assert (found.problems, found.expected.model) == ([], "m")
    found = checked(tmp_path, *named("s3://m", "s3://m:red"))
    assert (found.problems, found.expected.model) == ([], "s3://m")
    assert problems(checked(tmp_path, *named("m:blue", "m"))) == [(2, "model_mismatch")]
    assert problems(checked(tmp_path, *named("m", "mm", "mm:m"))) == [
        (2, "model_mismatch"),
        (3, "model_mismatch"),
    ]


def test_every_problem_has_its_line_and_openais_code(tmp_path: Path) -> None:
    found = checked(
        tmp_path,
        CHAT,
        "{not json",
        CHAT | {"custom_id": "b", "url": "/v1/completions"},
        CHAT | {"custom_id": "c", "body": {"model": "other", "messages": []}},
        CHAT,
        CHAT | {"custom_id": ""},
        CHAT | {"custom_id": "d", "method": "GET"},
        CHAT | {"custom_id": "e", "url": "/v1/nothing"},
        CHAT | {"custom_id": "f", "body": [1]},
        "[1]",
        CHAT | {"custom_id": "g", "body": {"model": 7}},
    )
    assert problems(found) == [
        (2, "invalid_json_line"),
        (3, "url_mismatch"),
        (4, "model_mismatch"),
        (5, "duplicate_custom_id"),
        (6, "missing_required_parameter"),
        (7, "invalid_method"),
        (8, "invalid_url"),
        (9, "missing_required_parameter"),
        (10, "invalid_json_line"),
        (11, "invalid_value"),
    ]
    assert found.duplicates == {5}
    assert found.problems[3].message == "custom_id is that of line 1"


def test_a_file_without_lines_is_empty(tmp_path: Path) -> None:
    assert problems(checked(tmp_path, "", "  ")) == [(None, "empty_file")]


def test_lines_need_a_model_unless_one_is_given(tmp_path: Path) -> None:
    without = CHAT | {"body": {"messages": []}}
    assert problems(checked(tmp_path, without)) == [(1, "missing_model")]
    assert problems(checked(tmp_path, without, model="m")) == []
    assert problems(checked(tmp_path, CHAT, model="n", any_model=True)) == []


def test_a_byte_order_mark_and_windows_line_ends_are_no_part_of_a_line(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + json.dumps(CHAT).encode() + b"\r\n\r\n")
    assert validate(path, Expected()).problems == []


def test_a_compressed_file_is_the_same_batch(tmp_path: Path) -> None:
    plain = write(tmp_path / "in.jsonl", [line(1), line(2)])
    packed = tmp_path / "in.jsonl.gz"
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    assert validate(packed, Expected()).digest == validate(plain, Expected()).digest


def test_a_grown_file_has_the_fingerprint_of_its_earlier_lines(tmp_path: Path) -> None:
    short = validate(write(tmp_path / "a", [line(1), line(2)]), Expected())
    grown = validate(write(tmp_path / "b", [line(1), line(2), line(3)]), Expected(), earlier=2)
    changed = validate(write(tmp_path / "c", [line(1), line(3), line(2)]), Expected(), earlier=2)
    assert grown.earlier == short.digest != grown.digest
    assert changed.earlier != short.digest
    assert validate(tmp_path / "a", Expected(), earlier=3).earlier is None


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(ids=st.lists(st.text(min_size=1, max_size=3, alphabet="ab\u00e9"), max_size=40))
def test_exactly_the_repeated_ids_are_duplicates(tmp_path: Path, ids: list[str]) -> None:
    found = checked(tmp_path, *(CHAT | {"custom_id": each} for each in ids))
    assert found.duplicates == {n for n, each in enumerate(ids, 1) if each in ids[: n - 1]}


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(data=st.binary(max_size=200))
def test_no_bytes_raise_anything(tmp_path: Path, data: bytes) -> None:
    assume(data[:2] not in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
    path = tmp_path / "in.jsonl"
    path.write_bytes(data)
    found = validate(path, Expected())
    assert found.total == len(list(numbered(path)))
    assert found.invalid == found.total


def test_a_missing_package_for_a_compression_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "zstandard", None)
    (tmp_path / "in.jsonl.zst").write_bytes(b"")
    with pytest.raises(Exception, match=r"inferbus\[zstd\]"):
        validate(tmp_path / "in.jsonl.zst", Expected())
