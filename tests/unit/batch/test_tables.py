"""Reading tables as batches."""

from __future__ import annotations

import gzip
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.feather as feather
import pyarrow.parquet as pq
import pytest

from inferbus.schemas.errors import InvalidRequest
from inferbus.workers.batch.lines import Expected, Unusable, parse
from inferbus.workers.batch.reading import batch_file, numbered, stamp
from inferbus.workers.batch.template import Template, template
from inferbus.workers.batch.validation import Validation, validate

ROWS: list[dict[str, Any]] = [
    {"id": f"q{n}", "text": f"Question\n{n}, \u00e9", "n": n} for n in range(1, 601)
]
PROMPT = template({"prompt": "text", "custom_id": "id"}, {"model": "m"})


def checked(path: Path, made: Template = PROMPT, **more: Any) -> Validation:
    return validate(path, Expected(), template=made, **more)


def prompts(path: Path, made: Template = PROMPT) -> list[str]:
    """What the rows of a file ask; their problems where they have some."""
    found = []
    for number, line in numbered(path, made):
        try:
            found.append(json.loads(bytes(parse(number, line).body))["messages"][-1]["content"])
        except Unusable as error:
            found.append(str(error))
    return found


def as_jsonl(path: Path) -> None:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in ROWS))


def as_csv(path: Path, delimiter: str = ",") -> None:
    rows = [list(ROWS[0]), *([row["id"], f'"{row["text"]}"', str(row["n"])] for row in ROWS)]
    text = "".join(f"{delimiter.join(map(str, row))}\r\n" for row in rows).encode("utf-8-sig")
    path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)


def as_dataset(path: Path) -> None:
    """As `save_to_disk` of Hugging Face's datasets writes it."""
    path.mkdir()
    names = ["data-00000-of-00002.arrow", "data-00001-of-00002.arrow"]
    for name, rows in zip(names, (ROWS[:200], ROWS[200:]), strict=True):
        table = pa.Table.from_pylist(rows)
        with pa.OSFile(str(path / name), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table)
    state = {"_data_files": [{"filename": name} for name in names], "_fingerprint": "f", "_split": "train"}
    (path / "state.json").write_text(json.dumps(state))
    (path / "dataset_info.json").write_text("{}")


def as_folder(path: Path) -> None:
    path.mkdir()
    pq.write_table(pa.Table.from_pylist(ROWS[300:]), path / "part-1.parquet")
    pq.write_table(pa.Table.from_pylist(ROWS[:300]), path / "part-0.parquet")
    (path / "_SUCCESS").touch()


@pytest.mark.parametrize(
    ("name", "write"),
    [
        ("in.jsonl", as_jsonl),
        ("in.csv", as_csv),
        ("in.csv.gz", as_csv),
        ("in.tsv", lambda path: as_csv(path, "\t")),
        ("in.parquet", lambda path: pq.write_table(pa.Table.from_pylist(ROWS), path, row_group_size=70)),
        ("in.feather", lambda path: feather.write_feather(pa.Table.from_pylist(ROWS), path)),
        ("dataset", as_dataset),
        ("folder", as_folder),
    ],
)
def test_every_format_is_the_same_batch(tmp_path: Path, name: str, write: Callable[[Path], None]) -> None:
    as_jsonl(tmp_path / "expected.jsonl")
    write(tmp_path / name)
    found = checked(tmp_path / name)
    assert (found.problems, found.total, found.expected.model) == ([], 600, "m")
    assert found.digest == checked(tmp_path / "expected.jsonl").digest
    assert [number for number, _ in numbered(tmp_path / name, PROMPT)] == list(range(1, 601))


def test_a_grown_table_has_the_fingerprint_of_its_earlier_rows(tmp_path: Path) -> None:
    as_folder(tmp_path / "folder")
    before, when = checked(tmp_path / "folder"), stamp(tmp_path / "folder")
    pq.write_table(pa.Table.from_pylist([{"id": "new", "text": "?"}]), tmp_path / "folder" / "part-2.parquet")
    grown = checked(tmp_path / "folder", earlier=600)
    assert (grown.total, grown.earlier) == (601, before.digest)
    assert stamp(tmp_path / "folder") != when


def test_nothing_is_made_of_rows_that_are_done(tmp_path: Path) -> None:
    as_csv(tmp_path / "in.csv")
    lines = dict(numbered(tmp_path / "in.csv", PROMPT, done=lambda number: number != 2))
    assert (lines[1], json.loads(lines[2])["custom_id"]) == (b"", "q2")


@pytest.mark.parametrize("first", [0, 1, 100_000, 10**9])
def test_a_table_is_also_a_batch_file_of_the_same_lines_and_problems(tmp_path: Path, first: int) -> None:
    rows = [*ROWS[:9], {"id": "none"}, "", {"id": "long", "text": "x" * 700_000}, *ROWS[9:]]
    (tmp_path / "in.jsonl").write_text("".join(f"{json.dumps(row)}\n" if row else "\n" for row in rows))
    pieces = list(batch_file(tmp_path / "in.jsonl", PROMPT))
    assert len(pieces) > 1
    assert b"".join(batch_file(tmp_path / "in.jsonl", PROMPT, first)) == b"".join(pieces)[first:]
    (tmp_path / "made.jsonl").write_bytes(b"".join(pieces))
    assert list(numbered(tmp_path / "made.jsonl")) == list(numbered(tmp_path / "in.jsonl", PROMPT))
    assert validate(tmp_path / "made.jsonl", Expected()) == checked(tmp_path / "in.jsonl")
    assert b"".join(batch_file(tmp_path / "made.jsonl", None, first)) == b"".join(pieces)[first:]


def test_a_batch_file_may_have_any_name_and_a_table_may_not(tmp_path: Path) -> None:
    (tmp_path / "in.2026").write_text("{}\n")
    assert list(numbered(tmp_path / "in.2026")) == [(1, b"{}")]
    with pytest.raises(InvalidRequest, match=r"unknown kind of file \.2026"):
        checked(tmp_path / "in.2026")


def test_rows_that_make_no_request_are_problems_of_their_own(tmp_path: Path) -> None:
    (tmp_path / "in.csv").write_bytes(b"id,text\n1,a\n\n2\n3,b,c\n4,\xe9\n1,e\n")
    found = checked(tmp_path / "in.csv")
    assert [(each.line, each.code, each.message) for each in found.problems] == [
        (2, "invalid_value", "the row has 1 fields, and the header 2"),
        (3, "invalid_value", "the row has 3 fields, and the header 2"),
        (4, "invalid_value", "column text: not UTF-8 text, or no value that JSON has"),
        (5, "duplicate_custom_id", "custom_id is that of line 1"),
    ]
    (tmp_path / "in.jsonl").write_text('{"id": "1"}\n[1]\n{"id": "2", "text": null}\n')
    assert [(each.line, each.code, each.param) for each in checked(tmp_path / "in.jsonl").problems] == [
        (1, "missing_required_parameter", "text"),
        (2, "invalid_json_line", None),
        (3, "missing_required_parameter", "text"),
    ]


def test_text_of_another_encoding_is_a_problem_of_its_row_alone(tmp_path: Path) -> None:
    texts = pa.array([b"a", b"\xe9", b"c"], pa.binary()).cast(pa.string(), safe=False)
    table = pa.table(
        {"id": pa.array(["1", "2", "3"]), "text": pa.Array.from_buffers(pa.string(), 3, texts.buffers())}
    )
    pq.write_table(table, tmp_path / "in.parquet")
    found = prompts(tmp_path / "in.parquet")
    assert (found[0], found[2]) == ("a", "c")
    assert found[1].startswith("column text: ")


def test_text_in_binary_columns_is_text(tmp_path: Path) -> None:
    pq.write_table(pa.table({"id": [1], "text": [b"a"]}), tmp_path / "in.parquet")
    assert prompts(tmp_path / "in.parquet") == ["a"]


def test_a_long_cell_is_read(tmp_path: Path) -> None:
    (tmp_path / "in.csv").write_text(f"id,text\n1,{'x' * 200_000}\n")
    assert len(prompts(tmp_path / "in.csv")[0]) == 200_000


def parquet(tmp_path: Path, name: str = "in.parquet", **columns: Any) -> Path:
    pq.write_table(pa.table(columns), tmp_path / name)
    return tmp_path / name


def damaged(tmp_path: Path, name: str, data: bytes) -> Path:
    (tmp_path / name).write_bytes(data)
    return tmp_path / name


def splits(tmp_path: Path) -> Path:
    as_dataset_dict = tmp_path / "dict"
    as_dataset_dict.mkdir()
    as_dataset(as_dataset_dict / "train")
    (as_dataset_dict / "dataset_dict.json").write_text('{"splits": ["train"]}')
    return as_dataset_dict


def without_state(tmp_path: Path) -> Path:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "state.json").write_text("{}")
    return tmp_path / "folder"


@pytest.mark.parametrize(
    ("write", "said"),
    [
        (lambda folder: folder / "none.csv", "No such file"),
        (lambda folder: folder / "none.parquet", "No such file"),
        (lambda folder: damaged(folder, "in.xlsx", b"PK"), "unknown kind of file .xlsx; known are .jsonl"),
        (lambda folder: damaged(folder, "in.parquet.gz", b""), "unpack"),
        (lambda folder: damaged(folder, "in.parquet", b""), "(?i)parquet"),
        (lambda folder: damaged(folder, "in.parquet", b"PAR1 nonsense PAR1"), "(?i)parquet"),
        (lambda folder: damaged(folder, "in.arrow", b"ARROW1 nonsense"), "(?i)arrow|file"),
        (lambda folder: damaged(folder, "in.feather", b"nonsense"), "(?i)arrow|stream|message|read"),
        (lambda folder: damaged(folder, "in.csv", "id,text".encode("utf-16")), "is UTF-16"),
        (lambda folder: damaged(folder, "in.csv.gz", b"id,text"), "(?i)gzip"),
        (lambda folder: damaged(folder, "in.csv.gz", gzip.compress(b"id,text\n1,a\n" * 99)[:-20]), "(?i)end"),
        (lambda folder: damaged(folder, "in.csv", b'id,text\n1,"a\n'), "line 2: unexpected end of data"),
        (lambda folder: damaged(folder, "in.csv", b"id;text\n1;a\n"), "no column text; it has id;text"),
        (lambda folder: damaged(folder, "in.csv", b"id,text,text\n1,a,b\n"), "text is there more than once"),
        (
            lambda folder: damaged(folder, "in.csv", b"id,t\xff\n1,a\n"),
            r"no column text; it has id, t\\udcff",
        ),
        (lambda folder: parquet(folder, id=[1], question=["a"]), "no column text; it has id, question"),
        (splits, "holds several datasets; name one of them: train"),
        (without_state, "is not the state of a dataset"),
        (lambda folder: folder, "neither Parquet files nor"),
    ],
)
def test_a_file_that_cannot_be_read_is_named_with_the_reason(
    tmp_path: Path, write: Callable[[Path], Path], said: str
) -> None:
    path = write(tmp_path)
    with pytest.raises(InvalidRequest, match=said) as caught:
        checked(path)
    assert str(path) in caught.value.message


def test_a_table_without_a_mapping_is_refused_with_its_columns(tmp_path: Path) -> None:
    as_csv(tmp_path / "in.csv")
    for path in (parquet(tmp_path, id=[1], text=["a"]), tmp_path / "in.csv"):
        with pytest.raises(InvalidRequest, match=r"needs a mapping.*columns are id, text"):
            validate(path, Expected())
    with pytest.raises(InvalidRequest, match=r"broken.csv.*No such file"):
        validate(tmp_path / "broken.csv", Expected())
    with pytest.raises(InvalidRequest, match=r"broken.parquet"):
        validate(damaged(tmp_path, "broken.parquet", b"nonsense that is long enough"), Expected())


@pytest.mark.parametrize("data", [b"", b"id,text\n"])
def test_a_table_without_rows_is_empty(tmp_path: Path, data: bytes) -> None:
    (found,) = checked(damaged(tmp_path, "in.csv", data)).problems
    assert found.code == "empty_file"


def test_csv_needs_no_package_and_parquet_names_the_one_that_it_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = parquet(tmp_path, id=[1], text=["a"])
    as_csv(tmp_path / "in.csv")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    assert checked(tmp_path / "in.csv").total == 600
    with pytest.raises(InvalidRequest, match=r"inferbus\[tables\]"):
        checked(path)
