"""The output and error files of a batch.

While the batch runs they are called `<name>.partial` and hold whole lines in the order of completion, each
synced before its result is removed elsewhere. So they say which lines are done, whatever else is lost. At the
end they get their own names, each at once.
"""

from __future__ import annotations

import contextlib
import os
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, Final

import msgspec

from inferbus.schemas.errors import BY_CODE, CallerError, Ended, ErrorBody
from inferbus.workers.batch.counts import Counts, Usage
from inferbus.workers.batch.errors import BatchHeld, OutputFailed

_ID: Final = b'{"id":"batch_req_'

STATUS_CODES: Final = {
    "context_length_exceeded": 400,
    "payload_too_large": 413,
    "model_not_found": 404,
    "deadline_exceeded": 408,
    "cancelled": 499,
    "overloaded": 503,
    "no_worker": 503,
}
"""HTTP status codes of errors; others are 400 where the caller is at fault, and 500 where not."""

ENDED: Final = {
    "batch_cancelled": "the batch was cancelled before this line was done",
    "batch_expired": "the batch's window ended before this line was done",
}
"""Codes of lines that have no response, and what they mean."""


def answer_line(batch: str, number: int, custom_id: str, request: str, answer: bytes) -> bytes:
    """A line of the output file.

    Args:
        batch: The batch's id.
        number: Of the input line.
        custom_id: Of the input line.
        request: The job that answered it.
        answer: JSON.
    """
    identity = f"{batch}_{number}".encode()
    named = msgspec.json.encode(custom_id)
    head = b'%b%b","custom_id":%b,"response":{"status_code":200,' % (_ID, identity, named)
    return b'%b"request_id":"%b","body":%b},"error":null}\n' % (head, request.encode(), answer)


def error_line(
    batch: str, number: int, custom_id: str | None, request: str | None, error: ErrorBody | str
) -> bytes:
    """A line of the error file.

    Args:
        batch: The batch's id.
        number: Of the input line.
        custom_id: Of the input line, where it has one.
        request: The job that it was sent as, if it was.
        error: What the line ended with; `batch_cancelled` or `batch_expired` where it has no response.
    """
    response, ended = None, None
    if isinstance(error, str):
        ended = {"code": error, "message": ENDED[error]}
    else:
        callers = issubclass(BY_CODE.get(error.code, CallerError), CallerError | Ended)
        response = {
            "status_code": STATUS_CODES.get(error.code, 400 if callers else 500),
            "request_id": request,
            "body": {"error": error},
        }
    line = {"id": f"batch_req_{batch}_{number}", "custom_id": custom_id, "response": response, "error": ended}
    return msgspec.json.encode(line) + b"\n"


class Done:
    """Which lines are done: a bit for each."""

    def __init__(self) -> None:
        self._bits = bytearray()
        self.count = 0

    def __contains__(self, number: int) -> bool:
        byte = number >> 3
        return byte < len(self._bits) and bool(self._bits[byte] & (1 << (number & 7)))

    def add(self, number: int) -> bool:
        """Marks a line; False where it was done already."""
        if number in self:
            return False
        byte = number >> 3
        if byte >= len(self._bits):
            self._bits.extend(bytes(byte + 1 - len(self._bits) + 4096))
        self._bits[byte] |= 1 << (number & 7)
        self.count += 1
        return True


class _Body(msgspec.Struct, gc=False):
    usage: dict[str, Any] | None = None


class _Response(msgspec.Struct, gc=False):
    body: _Body = msgspec.field(default_factory=_Body)


class _Ended(msgspec.Struct, gc=False):
    code: str = ""


class _Written(msgspec.Struct, gc=False):
    id: str
    response: _Response | None = None
    error: _Ended | None = None


_written: Final = msgspec.json.Decoder(_Written)


Lines = dict[Path, list[bytes]]
"""Lines by the file that they are for."""


class Output:
    """The two files of one batch; nothing else writes to them meanwhile.

    Args:
        path: Of the output file.
        errors: Of the error file.

    Attributes:
        done: The lines that are in either file.
        counts: What became of them.
        usage: Tokens of the answers.
    """

    def __init__(self, path: Path, errors: Path) -> None:
        self.path, self.errors = path, errors
        self.done = Done()
        self.counts = Counts()
        self.usage = Usage()
        self._files: dict[Path, IO[bytes]] = {}
        self._waiting: Lines = {path: [], errors: []}

    @property
    def waiting(self) -> int:
        """Lines that are not written yet."""
        return sum(map(len, self._waiting.values()))

    def open(self) -> None:
        """Opens both files, and learns from what they hold which lines are done.

        Raises:
            BatchHeld: Another process writes to them.
            OutputFailed: They cannot be opened.
        """
        self.done, self.counts, self.usage = Done(), Counts(), Usage()
        try:
            for path in (self.path, self.errors):
                partial = partial_path(path)
                partial.parent.mkdir(parents=True, exist_ok=True)
                found = path if path.exists() and not partial.exists() else partial
                file = found.open("a+b", buffering=0)
                self._files[path] = file
                _lock(file)
                self._recover(path, file)
                found.rename(partial)
        except OSError as error:
            self.close()
            raise OutputFailed(f"{error.filename or self.path}: {error.strerror}") from None
        except (BatchHeld, OutputFailed):
            self.close()
            raise

    def size(self, path: Path) -> int:
        """Bytes of one of the two files, while they are open."""
        return os.fstat(self._files[path].fileno()).st_size

    def read(self, path: Path, offset: int, size: int) -> bytes:
        """A part of one of the two files, while they are open."""
        file = self._files[path]
        file.seek(offset)  # What is appended goes to the end all the same.
        return file.read(size)

    def replace(self, path: Path, file: Path) -> None:
        """Makes another file one of the two; to be called while they are not open.

        Raises:
            OutputFailed: Not possible.
        """
        try:
            file.replace(partial_path(path))
            path.unlink(missing_ok=True)
        except OSError as error:
            raise OutputFailed(f"{error.filename or path}: {error.strerror}") from None

    def answered(self, number: int, line: bytes, usage: dict[str, Any] | None) -> bool:
        """Takes an answer for the output file; False: the line is done already."""
        if not self.done.add(number):
            return False
        self._waiting[self.path].append(line)
        self.counts.succeeded += 1
        self.usage.add(usage)
        return True

    def failed(self, number: int, line: bytes, code: str | None) -> bool:
        """Takes a line for the error file; `code` where it has no response. False: it is done already."""
        if not self.done.add(number):
            return False
        self._waiting[self.errors].append(line)
        self.counts.count(code)
        return True

    def take(self) -> Lines:
        """What is waiting, to be given to `write` on any thread."""
        taken, self._waiting = self._waiting, {path: [] for path in self._waiting}
        return taken

    def write(self, taken: Lines) -> None:
        """Appends and syncs lines.

        Raises:
            OutputFailed: It cannot be written; the files end with a whole line all the same.
        """
        for path, lines in taken.items():
            if lines:
                self._append(path, b"".join(lines))

    def finish(self, *, ordered: bool) -> None:
        """Gives the files their own names; a file without lines is not left behind.

        Args:
            ordered: Put the lines into the order of the input.

        Raises:
            OutputFailed: Not possible; both are complete under their partial names.
        """
        try:
            for path in (self.path, self.errors):
                partial = partial_path(path)
                if not partial.stat().st_size:
                    partial.unlink()
                elif ordered:
                    _sort(partial, path)
                else:
                    partial.rename(path)
            _sync_folder(self.path.parent)
        except OSError as error:
            raise OutputFailed(f"{error.filename}: {error.strerror}") from None
        self.close()

    def close(self) -> None:
        """Lets other processes write."""
        for file in self._files.values():
            file.close()
        self._files.clear()

    def _append(self, path: Path, data: bytes) -> None:
        file = self._files[path]
        end = os.fstat(file.fileno()).st_size
        try:
            view = memoryview(data)
            while view:
                view = view[file.write(view) :]
            os.fsync(file.fileno())
        except OSError as error:
            with contextlib.suppress(OSError):
                file.truncate(end)
            raise OutputFailed(f"{partial_path(path)}: {error.strerror}") from None

    def _recover(self, path: Path, file: IO[bytes]) -> None:
        """Reads what an earlier run has written; a line that it did not finish is cut off."""
        end = 0
        for raw in _lines(file):
            if not raw.endswith(b"\n") and (raw.startswith(_ID) or _ID.startswith(raw)):
                break
            end += len(raw)
            try:
                written = _written.decode(raw)
                number = int(written.id.rpartition("_")[2])
            except (msgspec.DecodeError, ValueError):
                raise OutputFailed(f"{path}: exists, and is no output of a batch") from None
            if not self.done.add(number):
                continue
            if path == self.path:
                self.counts.succeeded += 1
                self.usage.add(written.response.body.usage if written.response else None)
            else:
                self.counts.count(written.error.code if written.error else None)
        file.truncate(end)


def _lines(file: IO[bytes]) -> Iterator[bytes]:
    # A reader of its own: the file itself has no buffer.
    with open(file.fileno(), "rb", closefd=False) as reader:
        reader.seek(0)
        yield from reader


def _sort(partial: Path, path: Path) -> None:
    """Writes the lines of a file in the order of the input; keeps eight bytes of each in memory."""
    offsets = array("Q")
    temporary = path.with_name(f"{path.name}.sorting")
    with partial.open("rb") as source, temporary.open("wb") as target:
        offset = 0
        for raw in source:
            number = int(raw[len(_ID) : raw.index(b'"', len(_ID))].rpartition(b"_")[2])
            if number >= len(offsets):
                offsets.extend([0] * (number + 1 - len(offsets)))
            offsets[number] = offset + 1
            offset += len(raw)
        for found in offsets:
            if found:
                source.seek(found - 1)
                target.write(source.readline())
        target.flush()
        os.fsync(target.fileno())
    temporary.rename(path)
    partial.unlink()


def whole_lines(path: Path) -> Iterator[bytes]:
    """The whole lines of an output or error file, under whichever name it has now."""
    found = next((each for each in (partial_path(path), path) if each.exists()), None)
    if found is None:
        return
    with found.open("rb") as file:
        yield from (line for line in file if line.endswith(b"\n"))


def partial_path(path: Path) -> Path:
    """What a file is called while the batch runs."""
    return path.with_name(f"{path.name}.partial")


def _lock(file: IO[bytes]) -> None:
    try:
        import fcntl
    except ImportError:  # Windows: the lease alone keeps others away.
        return
    try:
        fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise BatchHeld("another process on this machine writes these output files") from None


def _sync_folder(folder: Path) -> None:
    if os.name == "nt":
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
