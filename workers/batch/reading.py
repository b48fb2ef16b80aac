"""Reading the input of a batch, whatever it is: a number and a line of a batch file for each of its rows.

Lines are numbered from 1, as an editor does, and blank ones are passed over; rows of a table are numbered
from 1 without its header. Nothing here keeps more than a few rows in memory.
"""

from __future__ import annotations

import codecs
import contextlib
import gzip
import io
import sys
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any, Final, Literal, cast

import msgspec

from inferbus.schemas.errors import InvalidRequest
from inferbus.workers.batch import tables
from inferbus.workers.batch.lines import Problem, problem_line
from inferbus.workers.batch.template import Filling, Template

Format = Literal["lines", "csv", "tsv", "arrow"]

FORMATS: Final[dict[str, Format]] = {
    "": "lines",
    ".jsonl": "lines",
    ".ndjson": "lines",
    ".json": "lines",
    ".txt": "lines",
    ".csv": "csv",
    ".tsv": "tsv",
    ".parquet": "arrow",
    ".pq": "arrow",
    ".arrow": "arrow",
    ".feather": "arrow",
    ".ipc": "arrow",
}
"""What a file is, by the end of its name, less that of a compression."""

COMPRESSIONS: Final = (".gz", ".zst")

PIECE: Final = 512 * 1024
"""Bytes of a batch file that are in memory at once."""

_DELIMITERS: Final = {"csv": ",", "tsv": "\t"}


def numbered(
    path: Path, template: Template | None = None, *, done: Callable[[int], bool] | None = None
) -> Iterator[tuple[int, bytes]]:
    """The lines of a batch file; with a template, those that it makes of a file's rows.

    Args:
        path: A file, or the folder of a dataset.
        template: What is made of a row; None: the rows are lines already.
        done: Says of which rows of a table nothing is made: their lines are empty.

    Raises:
        InvalidRequest: The file cannot be read, is damaged, has not the columns of the template, or is a
            table and there is no template.
    """
    found = format_of(path, template)
    try:
        if template is None:
            if found != "lines":
                example = "a table needs a mapping, --map prompt=COLUMN for example"
                raise InvalidRequest(f"{path}: {example}; its columns are {tables.listed(names(path))}")
            with opened(path) as file:
                yield from _lines(file)
        else:
            filling = Filling(template, template.columns)
            yield from _filled(filling, _rows(path, found, template.columns), done)
    except _damages() as error:
        raise InvalidRequest(f"{path}: {getattr(error, 'strerror', None) or error}") from None


def batch_file(path: Path, template: Template | None, first: int = 0) -> Iterator[bytes]:
    """What `numbered` reads as the bytes of a batch file, uncompressed, in pieces of half a megabyte.

    Args:
        path: A file, or the folder of a dataset.
        template: What is made of a row; None: the rows are lines already.
        first: Bytes that are left out.

    Raises:
        OSError, InvalidRequest: As `opened` and `numbered`.
    """
    if template is None:
        with opened(path) as file:
            file.seek(first)
            while data := file.read(PIECE):
                yield data
        return
    piece, last = bytearray(), 0
    for number, line in numbered(path, template):
        # Blank lines stand for those that it does not have, so that every line keeps its number.
        piece += b"\n" * (number - last - 1) + line + b"\n"
        last = number
        if len(piece) - first >= PIECE:
            yield bytes(piece[first:])
            piece, first = bytearray(), 0
        elif len(piece) <= first:
            first -= len(piece)
            piece = bytearray()
    if len(piece) > first:
        yield bytes(piece[first:])


def format_of(path: Path, template: Template | None) -> Format:
    """What a file is; without a template, one with another name is a batch file too.

    Raises:
        InvalidRequest: Nothing that can be read.
    """
    if path.is_dir():
        return "arrow"
    name = path.name.lower()
    packed = name.endswith(COMPRESSIONS)
    suffix = Path(name).with_suffix("").suffix if packed else Path(name).suffix
    found = FORMATS.get(suffix, None if template else "lines")
    if found is None:
        known = ", ".join(filter(None, FORMATS))
        raise InvalidRequest(
            f"{path}: unknown kind of file {suffix}; known are {known} and folders of a dataset"
        )
    if packed and found == "arrow":
        raise InvalidRequest(f"{path}: only text is read compressed; unpack the file first")
    return found


def names(path: Path) -> list[str]:
    """The columns of a table.

    Raises:
        InvalidRequest: The file cannot be read, or is damaged.
    """
    found = format_of(path, None)
    try:
        if found == "arrow":
            return tables.arrow_names(path)
        with opened(path) as file:
            return tables.csv_names(file, _DELIMITERS[found])
    except _damages() as error:
        raise InvalidRequest(f"{path}: {getattr(error, 'strerror', None) or error}") from None


def stamp(path: Path) -> tuple[int, int]:
    """Size and time of the last change, in nanoseconds, of a file or of all files of a folder.

    Raises:
        InvalidRequest: It cannot be read.
    """
    try:
        found = [each.stat() for each in tables.parts(path)]
    except OSError as error:
        raise InvalidRequest(f"{path}: {error.strerror}") from None
    return sum(each.st_size for each in found), max((each.st_mtime_ns for each in found), default=0)


@contextlib.contextmanager
def opened(path: Path) -> Iterator[IO[bytes]]:
    """A file of text as bytes: plain, `.gz`, or `.zst`.

    Raises:
        OSError: It cannot be read.
        InvalidRequest: It is no text that is read, or a package for its compression is missing.
    """
    with contextlib.ExitStack() as stack:
        raw = cast(IO[bytes], stack.enter_context(path.open("rb")))
        if path.suffix == ".gz":
            raw = cast(IO[bytes], stack.enter_context(gzip.open(raw, "rb")))
        elif path.suffix == ".zst":
            raw = stack.enter_context(_zstd(raw))
        if cast(io.BufferedReader, raw).peek(2)[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE):
            raise InvalidRequest(f"{path}: is UTF-16; only UTF-8 is read")
        yield raw


def _zstd(raw: IO[bytes]) -> IO[bytes]:
    try:
        import zstandard
    except ImportError:
        raise InvalidRequest("reading .zst files needs: pip install 'inferbus[zstd]'") from None
    reader = zstandard.ZstdDecompressor().stream_reader(raw, read_across_frames=True)
    return cast(IO[bytes], io.BufferedReader(reader))


def _damages() -> tuple[type[Exception], ...]:
    """What reading a file raises where it is damaged, or cannot be read."""
    zstandard = sys.modules.get("zstandard")
    return (OSError, EOFError, zlib.error, *((zstandard.ZstdError,) if zstandard else ()))


def _lines(file: IO[bytes]) -> Iterator[tuple[int, bytes]]:
    for number, raw in enumerate(file, 1):
        data = raw.removeprefix(codecs.BOM_UTF8) if number == 1 else raw
        data = data.strip()
        if data:
            yield number, data


def _rows(
    path: Path, found: Format, columns: Sequence[str]
) -> Iterator[tuple[int, Sequence[Any] | tables.Unreadable]]:
    if found == "arrow":
        yield from enumerate(tables.arrow_rows(path, columns), 1)
        return
    with opened(path) as file:
        if found == "lines":
            yield from _objects(file, columns)
        else:
            yield from enumerate(tables.csv_rows(path, file, _DELIMITERS[found], columns), 1)


def _objects(
    file: IO[bytes], columns: Sequence[str]
) -> Iterator[tuple[int, Sequence[Any] | tables.Unreadable]]:
    """Rows that are JSON lines."""
    fields = [
        (f"field_{n}", Any, msgspec.field(name=name, default=msgspec.UNSET)) for n, name in enumerate(columns)
    ]
    decoder = msgspec.json.Decoder(msgspec.defstruct("Row", fields))
    for number, data in _lines(file):
        try:
            yield number, msgspec.structs.astuple(decoder.decode(data))
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            yield number, tables.Unreadable("invalid_json_line", "the line is not a JSON object")


def _filled(
    filling: Filling,
    rows: Iterator[tuple[int, Sequence[Any] | tables.Unreadable]],
    done: Callable[[int], bool] | None,
) -> Iterator[tuple[int, bytes]]:
    for number, values in rows:
        if done is not None and done(number):
            yield number, b""
        elif isinstance(values, tables.Unreadable):
            yield number, problem_line(Problem(code=values.code, message=values.message), None)
        else:
            yield number, filling.line(number, values)
