"""Checking a whole file before anything of it is run.

The first reading keeps eight bytes of each line, for what repeats an id.
"""

from __future__ import annotations

import hashlib
import itertools
from array import array
from pathlib import Path
from typing import Final

import msgspec

from inferbus.workers.batch.lines import Expected, Problem, Unusable, parse
from inferbus.workers.batch.reading import numbered
from inferbus.workers.batch.template import Template

BUCKETS: Final = 64
"""Parts in which ids are compared, so that only one of them is sorted at a time."""

PROBLEMS: Final = 1000
"""Problems that are reported one by one; the rest are counted."""


class Digest:
    """The fingerprint of the lines so far: of what they say, whatever compresses or separates them."""

    def __init__(self) -> None:
        self._hash = hashlib.blake2b(digest_size=16)

    def add(self, data: bytes) -> None:
        """Adds a line."""
        self._hash.update(data + b"\n")

    def text(self) -> str:
        """Of all lines so far."""
        return self._hash.hexdigest()


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


def validate(
    path: Path, expected: Expected, *, template: Template | None = None, earlier: int = 0
) -> Validation:
    """Reads a whole file, and reports everything that is wrong with it.

    Args:
        path: The file, or the folder of a dataset.
        expected: What is asked for.
        template: What is made of its rows; None: they are lines.
        earlier: How many lines an earlier reading had.

    Raises:
        InvalidRequest: It cannot be read.
    """
    found = Validation(expected=expected)
    digest, hashes = Digest(), [array("q") for _ in range(BUCKETS)]
    for number, data in numbered(path, template):
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
        hashed = hash(line.custom_id)
        hashes[hashed % BUCKETS].append(hashed)
    found.digest = digest.text()
    if not found.total:
        found.problems.append(Problem(code="empty_file", message="there are no lines"))
    if repeated := _repeated(hashes):
        _find_duplicates(path, expected, template, repeated, found)
    return found


def _find_duplicates(
    path: Path, expected: Expected, template: Template | None, repeated: set[int], found: Validation
) -> None:
    """Reads the file again, for the numbers of the lines whose ids were seen before."""
    first: dict[str, int] = {}
    for number, data in numbered(path, template):
        try:
            line = parse(number, data)
            expected = expected.check(line)
        except Unusable:
            continue
        if hash(line.custom_id) not in repeated or first.setdefault(line.custom_id, number) == number:
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
