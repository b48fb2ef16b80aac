"""Reading the lines of a batch file, and what can be wrong with them.

Lines are numbered from 1, as an editor does; blank lines are passed over. Nothing here keeps more than one
line in memory; `validate` keeps eight bytes of each.
"""

from __future__ import annotations

import codecs
import contextlib
import gzip
import hashlib
import io
import itertools
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, Final, cast

import msgspec

from inferbus.schemas.errors import InvalidRequest
from inferbus.schemas.subjects import Kind

KINDS: Final[dict[str, Kind]] = {
    "/v1/chat/completions": "chat",
    "/v1/completions": "completions",
    "/v1/tokens": "tokens",
}
"""The kind of request behind each url of a line."""

CUSTOM_ID_CHARS: Final = 512
BUCKETS: Final = 64
"""Parts in which ids are compared, so that only one of them is sorted at a time."""

PROBLEMS: Final = 1000
"""Problems that are reported one by one; the rest are counted."""


class Problem(msgspec.Struct, frozen=True, kw_only=True):
    """Why a line cannot be run, as OpenAI's batch object has it.

    Attributes:
        code: `invalid_json_line`, `missing_required_parameter`, `invalid_value`, `invalid_method`,
            `invalid_url`, `url_mismatch`, `model_mismatch`, `missing_model`, `duplicate_custom_id` or
            `empty_file`.
        message: For people.
        line: Its number; None for the whole file.
        param: The field at fault.
    """

    code: str
    message: str
    line: int | None = None
    param: str | None = None


class Line(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One line that can be run.

    Attributes:
        number: In its file, from 1.
        custom_id: The caller's name for it.
        kind: Of the request.
        model: That it names; None: none.
        body: The request, as the file has it.
    """

    number: int
    custom_id: str
    kind: Kind
    model: str | None
    body: msgspec.Raw


class _Fields(msgspec.Struct, gc=False):
    custom_id: Any = None
    method: Any = "POST"
    url: Any = None
    body: msgspec.Raw = msgspec.Raw(b"null")


class _Body(msgspec.Struct, gc=False):
    model: Any = None


_fields: Final = msgspec.json.Decoder(_Fields)
_body: Final = msgspec.json.Decoder(_Body)


class Unusable(Exception):
    """A line that cannot be run.

    Args:
        problem: Why.
        custom_id: Of the line, where it has one.
    """

    def __init__(self, problem: Problem, custom_id: str | None = None) -> None:
        super().__init__(problem.message)
        self.problem = problem
        self.custom_id = custom_id


@contextlib.contextmanager
def opened(path: Path) -> Iterator[IO[bytes]]:
    """A batch file as bytes: plain, `.gz`, or `.zst`.

    Raises:
        OSError: It cannot be read.
        InvalidRequest: A package for this compression is missing.
    """
    with contextlib.ExitStack() as stack:
        raw: IO[bytes] = stack.enter_context(path.open("rb"))
        if path.suffix == ".gz":
            raw = cast(IO[bytes], stack.enter_context(gzip.open(raw, "rb")))
        elif path.suffix == ".zst":
            raw = stack.enter_context(_zstd(raw))
        yield raw


def _zstd(raw: IO[bytes]) -> IO[bytes]:
    try:
        import zstandard  # type: ignore[import-not-found]
    except ImportError:
        raise InvalidRequest("reading .zst files needs: pip install 'inferbus[zstd]'") from None
    reader = zstandard.ZstdDecompressor().stream_reader(raw, read_across_frames=True)
    return cast(IO[bytes], io.BufferedReader(reader))


def numbered(file: IO[bytes]) -> Iterator[tuple[int, bytes]]:
    """The lines of a file that are not blank, with their numbers."""
    for number, raw in enumerate(file, 1):
        data = raw.removeprefix(codecs.BOM_UTF8) if number == 1 else raw
        data = data.strip()
        if data:
            yield number, data


def parse(number: int, data: bytes) -> Line:
    """A line, checked as far as that goes without a worker.

    Raises:
        Unusable: Says why.
    """

    def unusable(code: str, message: str, param: str | None = None) -> Unusable:
        named = fields.custom_id if isinstance(fields.custom_id, str) else None
        return Unusable(Problem(code=code, message=message, line=number, param=param), named)

    fields = _Fields()
    try:
        fields = _fields.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise unusable("invalid_json_line", "the line is not a JSON object") from None
    custom_id = fields.custom_id
    if not isinstance(custom_id, str) or not custom_id:
        raise unusable("missing_required_parameter", "custom_id must be a text", "custom_id")
    if len(custom_id) > CUSTOM_ID_CHARS:
        raise unusable("invalid_value", f"custom_id has at most {CUSTOM_ID_CHARS} characters", "custom_id")
    if fields.method != "POST":
        raise unusable("invalid_method", "method must be POST", "method")
    kind = KINDS.get(fields.url) if isinstance(fields.url, str) else None
    if kind is None:
        raise unusable("invalid_url", f"url must be one of {', '.join(KINDS)}", "url")
    try:
        model = _body.decode(fields.body).model
    except (msgspec.DecodeError, RecursionError):
        raise unusable("missing_required_parameter", "body must be an object", "body") from None
    if model is not None and not isinstance(model, str):
        raise unusable("invalid_value", "model must be a text", "body.model")
    # A copy: a view would keep the whole line.
    body = msgspec.Raw(bytes(fields.body))
    return Line(number=number, custom_id=custom_id, kind=kind, model=model or None, body=body)


class Digest:
    """The fingerprint of the lines so far: of what they say, whatever compresses or separates them."""

    def __init__(self) -> None:
        self._hash = hashlib.blake2b(digest_size=16)

    def add(self, data: bytes) -> None:
        """Adds a line."""
        self._hash.update(data)
        self._hash.update(b"\n")

    def text(self) -> str:
        """Of all lines so far."""
        return self._hash.hexdigest()


class Expected(msgspec.Struct, frozen=True, kw_only=True):
    """What all lines of a batch have in common; None: what the first line has.

    Attributes:
        kind: Of the requests.
        model: The served model.
        any_model: The model is given, whatever the lines name.
    """

    kind: Kind | None = None
    model: str | None = None
    any_model: bool = False

    def check(self, line: Line) -> Expected:
        """What is expected of the lines after this one.

        Raises:
            Unusable: The line differs.
        """
        if self.kind not in (None, line.kind):
            raise _differs("url_mismatch", "all lines of a batch have one url", line, "url")
        model = self.model if self.any_model or line.model is None else line.model
        if model is None:
            raise _differs("missing_model", "neither the line nor --model names a model", line, "body.model")
        if self.model not in (None, model):
            raise _differs("model_mismatch", "all lines of a batch have one model", line, "body.model")
        if self.kind is not None and self.model is not None:
            return self
        return Expected(kind=line.kind, model=model, any_model=self.any_model)


class Validation(msgspec.Struct, kw_only=True):
    """What the first reading of a whole file has found.

    Attributes:
        total: Lines that are not blank.
        expected: What its lines have in common.
        digest: Of all lines.
        earlier: Of as many lines as an earlier reading had; None where there are fewer.
        problems: The first ones, by line.
        invalid: How many lines cannot be run.
        duplicates: The numbers of lines that repeat an id.
    """

    total: int = 0
    expected: Expected = msgspec.field(default_factory=Expected)
    digest: str = ""
    earlier: str | None = None
    problems: list[Problem] = []
    invalid: int = 0
    duplicates: set[int] = msgspec.field(default_factory=set)

    def add(self, problem: Problem) -> None:
        """Notes a line that cannot be run."""
        self.invalid += 1
        if len(self.problems) < PROBLEMS:
            self.problems.append(problem)


def validate(path: Path, expected: Expected, *, earlier: int = 0) -> Validation:
    """Reads a whole file, and reports everything that is wrong with it.

    Args:
        path: The file.
        expected: What is asked for.
        earlier: How many lines an earlier reading had.

    Raises:
        OSError: It cannot be read.
        InvalidRequest: A package for its compression is missing.
    """
    found = Validation(expected=expected)
    digest, hashes = Digest(), [array("Q") for _ in range(BUCKETS)]
    with opened(path) as file:
        for number, data in numbered(file):
            digest.add(data)
            found.total += 1
            if found.total == earlier:
                found.earlier = digest.text()
            try:
                line = parse(number, data)
                found.expected = found.expected.check(line)
            except Unusable as error:
                found.add(error.problem)
                continue
            hashed = _hash(line.custom_id)
            hashes[hashed % BUCKETS].append(hashed)
    found.digest = digest.text()
    if not found.total:
        found.problems.append(Problem(code="empty_file", message="the file has no lines"))
    if repeated := _repeated(hashes):
        _find_duplicates(path, expected, repeated, found)
    return found


def _find_duplicates(path: Path, expected: Expected, repeated: set[int], found: Validation) -> None:
    """Reads the file again, for the numbers of the lines whose ids were seen before."""
    first: dict[str, int] = {}
    with opened(path) as file:
        for number, data in numbered(file):
            try:
                line = parse(number, data)
                expected = expected.check(line)
            except Unusable:
                continue
            if _hash(line.custom_id) not in repeated or first.setdefault(line.custom_id, number) == number:
                continue
            found.duplicates.add(number)
            message = f"custom_id is that of line {first[line.custom_id]}"
            found.add(Problem(code="duplicate_custom_id", message=message, line=number, param="custom_id"))
    found.problems.sort(key=lambda each: each.line or 0)


def _repeated(hashes: list[array[int]]) -> set[int]:
    """The hashes that occur more than once."""
    repeated = set()
    for bucket in hashes:
        ordered = sorted(bucket)
        repeated |= {a for a, b in itertools.pairwise(ordered) if a == b}
    return repeated


def _hash(custom_id: str) -> int:
    digest = hashlib.blake2b(custom_id.encode(errors="surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def _differs(code: str, message: str, line: Line, param: str) -> Unusable:
    return Unusable(Problem(code=code, message=message, line=line.number, param=param), line.custom_id)
