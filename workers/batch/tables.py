"""Tables: CSV, Parquet, Arrow, folders of them, and frames in memory. Files are read in parts.

Only CSV needs no pyarrow; it is imported for the others alone.
"""

from __future__ import annotations

import contextlib
import csv
import io
import itertools
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Final, Protocol, runtime_checkable

import msgspec

from inferbus.schemas.errors import InvalidRequest

if TYPE_CHECKING:
    import pyarrow as pa

ROWS: Final = 256
"""Rows that are in memory at once."""

READ_AHEAD: Final = 1024 * 1024
"""Bytes of a column of a Parquet file that are read at once; otherwise all that a row group has of it."""

LARGEST_CELL: Final = 256 * 1024 * 1024
"""Characters of a cell of a CSV file; the largest line that travels."""

NAMED: Final = 20
"""Columns that an error's message names."""

_ARROW_FILE: Final = b"ARROW1"
_IN_MEMORY: Final = "the table"


@runtime_checkable
class Frame(Protocol):
    """A table in memory that gives itself as Arrow: of pandas, Arrow, Polars, and others."""

    def __arrow_c_stream__(self, requested_schema: object | None = None) -> object: ...


class Unreadable(msgspec.Struct, frozen=True):
    """A row that has not the values of a row.

    Attributes:
        code: As a problem has it.
        message: For people.
    """

    code: str
    message: str


def csv_names(file: IO[bytes], delimiter: str) -> list[str]:
    """The columns of a CSV file."""
    with _csv(file, delimiter) as reader:
        return next(reader, [])


def csv_rows(
    path: Path, file: IO[bytes], delimiter: str, columns: Sequence[str]
) -> Iterator[Sequence[str] | Unreadable]:
    """The rows of a CSV file, as texts; empty ones are passed over.

    Raises:
        InvalidRequest: A column is missing, or quotes are not closed.
    """
    with _csv(file, delimiter) as reader:
        try:
            names = next(reader, None)
            if names is None:
                return
            picked = _picked(path, names, columns)
            for values in filter(None, reader):
                if len(values) == len(names):
                    yield [values[each] for each in picked]
                else:
                    message = f"the row has {len(values)} fields, and the header {len(names)}"
                    yield Unreadable("invalid_value", message)
        except csv.Error as error:
            raise InvalidRequest(f"{path}: line {reader.line_num}: {error}") from None


def arrow_names(path: Path) -> list[str]:
    """The columns of a Parquet or Arrow file, or of a folder of them."""
    pa = _pyarrow()
    try:
        return list(_schema(parts(path)[0]).names)
    except pa.ArrowException as error:
        raise InvalidRequest(f"{path}: {error}") from None


def arrow_rows(path: Path, columns: Sequence[str]) -> Iterator[Sequence[Any]]:
    """The rows of a Parquet or Arrow file, or of a folder of them.

    Raises:
        InvalidRequest: A column is missing, the file is damaged, or pyarrow is not there.
        OSError: It cannot be read.
    """
    for batch in arrow_batches(path, columns):
        yield from zip(*(_values(batch.column(name)) for name in columns), strict=True)


def arrow_batches(path: Path, columns: Sequence[str] | None = None) -> Iterator[pa.RecordBatch]:
    """As `arrow_rows`, in batches of Arrow; `columns` None: all of them."""
    pa = _pyarrow()
    for part in parts(path):
        try:
            names = _schema(part).names
            if columns is not None:
                _picked(part, names, columns)
            yield from _parquet(part, columns) if _is_parquet(part) else _ipc(part)
        except pa.ArrowException as error:
            raise InvalidRequest(f"{part}: {error}") from None


def pandas_of(frame: Frame) -> Any:
    """The module pandas for a DataFrame of it; None for others."""
    pandas = sys.modules.get("pandas")
    return pandas if pandas is not None and isinstance(frame, pandas.DataFrame) else None


def held(frame: Frame) -> Any:
    """A frame that can be read more than once: a DataFrame of pandas as it is, others as a Table of Arrow.

    Raises:
        InvalidRequest: It cannot be read as Arrow, or pyarrow is not there.
    """
    pa = _pyarrow()
    try:
        return frame if pandas_of(frame) is not None else pa.table(frame)
    except (pa.ArrowException, TypeError, ValueError) as error:
        raise InvalidRequest(f"{_IN_MEMORY}: {error}") from None


def frame_names(frame: Frame) -> list[str]:
    """The columns of a frame.

    Raises:
        InvalidRequest: It cannot be read as Arrow, or pyarrow is not there.
    """
    return _frame(frame, None)[0]


def frame_rows(frame: Frame, columns: Sequence[str]) -> Iterator[Sequence[Any]]:
    """The rows of a frame.

    Raises:
        InvalidRequest: A column is missing, or cannot be read as Arrow; or pyarrow is not there.
    """
    pa = _pyarrow()
    _, reader = _frame(frame, columns)
    try:
        for batch in reader:
            for start in range(0, batch.num_rows, ROWS):
                part = batch.slice(start, ROWS)
                yield from zip(*(_values(part.column(name)) for name in columns), strict=True)
    except pa.ArrowException as error:
        raise InvalidRequest(f"{_IN_MEMORY}: {error}") from None


def _frame(frame: Any, columns: Sequence[str] | None) -> tuple[list[str], Any]:
    """The columns of a frame, and what reads those that are asked for; None: none of them."""
    pa = _pyarrow()
    try:
        if pandas_of(frame) is None:
            reader = pa.RecordBatchReader.from_stream(frame)
            names = list(reader.schema.names)
            _picked(_IN_MEMORY, names, columns or ())
            return names, reader
        # Others of its columns may have what Arrow has not.
        names = [str(name) for name in frame.columns]
        picked = _picked(_IN_MEMORY, names, columns or ())
        wanted = frame.iloc[:, picked].set_axis([names[at] for at in picked], axis="columns")
        return names, pa.Table.from_pandas(wanted, preserve_index=False).to_reader()
    except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
        raise InvalidRequest(f"{_IN_MEMORY}: {error}") from None


def parts(path: Path) -> list[Path]:
    """The files of a table: itself, or those of a folder, in their order.

    Raises:
        InvalidRequest: The folder is no table.
    """
    if not path.is_dir():
        return [path]
    state = path / "state.json"
    if state.exists():
        try:
            listed = msgspec.json.decode(state.read_bytes(), type=_State)
        except msgspec.DecodeError:
            raise InvalidRequest(f"{state}: is not the state of a dataset") from None
        return [path / each.filename for each in listed.data_files]
    splits = path / "dataset_dict.json"
    if splits.exists():
        names = ", ".join(sorted(each.name for each in path.iterdir() if each.is_dir()))
        raise InvalidRequest(f"{path}: holds several datasets; name one of them: {names}")
    found = sorted(each for each in path.iterdir() if _is_parquet(each))
    if not found:
        raise InvalidRequest(f"{path}: the folder has neither Parquet files nor a dataset's state.json")
    return found


class _File(msgspec.Struct):
    filename: str


class _State(msgspec.Struct):
    """Of a dataset that Hugging Face's `save_to_disk` has written."""

    data_files: list[_File] = msgspec.field(name="_data_files")


@contextlib.contextmanager
def _csv(file: IO[bytes], delimiter: str) -> Iterator[Any]:
    # For the whole process, which is why it is only ever raised.
    csv.field_size_limit(max(csv.field_size_limit(), LARGEST_CELL))
    # Bytes that are no UTF-8 are told of their row and column later.
    with io.TextIOWrapper(file, encoding="utf-8-sig", errors="surrogateescape", newline="") as text:
        yield csv.reader(text, delimiter=delimiter, strict=True)


def _picked(path: Path | str, names: Sequence[str], columns: Sequence[str]) -> list[int]:
    """Where the columns are among those of a table."""
    for column in columns:
        if names.count(column) > 1:
            raise InvalidRequest(f"{path}: the column {column} is there more than once", param=column)
        if column not in names:
            raise InvalidRequest(f"{path}: no column {column}; it has {listed(names)}", param=column)
    return [names.index(column) for column in columns]


def listed(names: Sequence[str]) -> str:
    """Columns, for a message."""
    more = len(names) - NAMED
    shown = ", ".join(names[:NAMED]) + (f" and {more} more" if more > 0 else "")
    return shown.encode(errors="backslashreplace").decode()


def _is_parquet(path: Path) -> bool:
    return path.suffix in (".parquet", ".pq")


def _schema(path: Path) -> pa.Schema:
    if _is_parquet(path):
        import pyarrow.parquet as pq

        return pq.read_schema(path)
    with _ipc_reader(path) as reader:
        return reader.schema


def _parquet(path: Path, columns: Sequence[str] | None) -> Iterator[pa.RecordBatch]:
    import pyarrow.parquet as pq

    with pq.ParquetFile(path, buffer_size=READ_AHEAD, pre_buffer=False) as file:
        wanted = None if columns is None else list(columns)
        yield from file.iter_batches(batch_size=ROWS, columns=wanted, use_threads=False)


def _ipc(path: Path) -> Iterator[pa.RecordBatch]:
    with _ipc_reader(path) as reader:
        many = getattr(reader, "num_record_batches", None)
        batches = iter(reader) if many is None else map(reader.get_batch, range(many))
        for batch in batches:
            yield from (batch.slice(start, ROWS) for start in range(0, batch.num_rows, ROWS))


def _ipc_reader(path: Path) -> Any:
    import pyarrow as pa

    with path.open("rb") as file:
        is_file = file.read(len(_ARROW_FILE)) == _ARROW_FILE
    source = pa.memory_map(str(path))
    # Datasets are written as streams.
    return pa.ipc.open_file(source) if is_file else pa.ipc.open_stream(source)


def _values(column: pa.Array) -> list[Any]:
    try:
        return column.to_pylist()  # type: ignore[no-any-return]
    except UnicodeDecodeError:
        return list(itertools.chain.from_iterable(map(_value, column)))


def _value(scalar: pa.Scalar) -> list[Any]:
    try:
        return [scalar.as_py()]
    except UnicodeDecodeError:
        # The bytes themselves, which are told of their row later.
        return [scalar.as_buffer().to_pybytes()]


def _pyarrow() -> Any:
    try:
        import pyarrow
    except ImportError:
        raise InvalidRequest("Parquet, Arrow and frames need: pip install 'inferbus[tables]'") from None
    return pyarrow
