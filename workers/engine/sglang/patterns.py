r"""Whether a regular expression is cheap to run, decided by rule before an engine runs it.

SGLang evaluates patterns in its scheduler, where nothing interrupts them and all
requests wait: stop patterns with Python's backtracking `re`, grammars with
xgrammar, once a token. `(?:.|.)*\Z.` and `(.{0,10})*` take minutes there.

The rule is strong determinism ("one-unambiguous" expressions; Brüggemann-Klein
and Wood, 1998): while an expression reads a text from the left, the next
character decides which of its positions comes next, and by which operator. So
there is one way to read any text, and a matcher that backtracks finds no second
one to try: an attempt takes steps in proportion to the text that it reads. The
check builds the expression's position automaton (Glushkov), with counted repeats
written out, and refuses two successors of one position that accept the same
character, two operators that lead to the same successor, and two ways to match
nothing.
"""

from __future__ import annotations

import functools
import importlib
import itertools
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final, NamedTuple

# The type checker's stubs leave these modules out, and whether it accepts a plain import of them depends on
# what its cache holds: imported by name, they are untyped in every run.
sre: Any = importlib.import_module("re._constants")
_parser: Any = importlib.import_module("re._parser")

POSITIONS: Final = 256
"""Most positions of a grammar's pattern: characters and classes, counted repeats written out."""

SUCCESSORS: Final = 4
"""Most successors of a position, on average over the positions that a pattern may have."""

PATTERN_CHARS: Final = 4096
"""Longest pattern in a grammar."""

_LAST: Final = sys.maxunicode
_LATIN: Final = 0xFF

Ranges = tuple[tuple[int, int], ...]
"""Code points, as ascending, disjoint, inclusive ranges."""

_ANY: Final[Ranges] = ((0, _LAST),)


class PatternRefused(ValueError):
    """Why a pattern is refused; the message quotes nothing of it."""


class Cost(NamedTuple):
    """The size of a deterministic pattern.

    Attributes:
        positions: Characters and classes, counted repeats written out.
        steps: Most characters that an attempt to match tries, times the length of the text if unbounded.
        longest: The longest match; None where unbounded.
        wide: Different classes with a range beyond Latin-1. Python takes milliseconds to compile one.
    """

    positions: int
    steps: int
    longest: int | None
    wide: int


def cost(pattern: str, *, positions: int = POSITIONS) -> Cost:
    """Checks that a pattern is deterministic.

    Args:
        pattern: In the syntax of Python's `re`, of which xgrammar's is a part.
        positions: Most positions that it may have.

    Raises:
        PatternRefused: It is no pattern, too large, ambiguous, or uses what a finite automaton does not
            have (lookaround, back references, flags, atomic groups).
    """
    if len(pattern) > PATTERN_CHARS:
        raise PatternRefused(f"has more than {PATTERN_CHARS} characters")
    try:
        tree = _parser.parse(pattern)
        if tree.state.flags != re.UNICODE:
            raise PatternRefused("must have no flags")
        automaton = _Automaton(positions)
        whole = automaton.sequence(tree)
        steps = automaton.check_successors(whole.first)
    except PatternRefused:
        raise
    except (re.error, OverflowError):
        raise PatternRefused("is no regular expression") from None
    except RecursionError:
        raise PatternRefused("is nested too deeply") from None
    return Cost(automaton.size, steps, whole.longest, len(automaton.wide))


class _Part(NamedTuple):
    """Part of an expression: whether it may be empty, its first and last positions, its longest match."""

    nullable: bool
    first: tuple[int, ...]
    last: tuple[int, ...]
    longest: int | None


_EMPTY: Final = _Part(nullable=True, first=(), last=(), longest=0)


class _Automaton:
    """The position automaton: which characters each position accepts, and which positions may follow it."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._accepts: list[Ranges] = []
        self._follow: list[set[int]] = []
        self.wide: set[tuple[Any, ...]] = set()

    @property
    def size(self) -> int:
        """The number of positions."""
        return len(self._accepts)

    def check_successors(self, first: Sequence[int]) -> int:
        """Counts the successors; refuses too many, and two of one position that accept the same character."""
        count = len(first) + sum(map(len, self._follow))
        if count > SUCCESSORS * self._limit:
            raise PatternRefused("has too many alternatives")
        checked: set[frozenset[int]] = set()
        for successors in (first, *self._follow):
            accepted = [self._accepts[position] for position in successors]
            # By identity: these are tuples of hundreds of ranges, and each one is made once.
            key = frozenset(map(id, accepted))
            if len(key) < len(accepted) or (key not in checked and _overlap(accepted)):
                raise _ambiguous()
            checked.add(key)
        return count

    def sequence(self, items: Iterable[tuple[Any, Any]]) -> _Part:
        """Parts one after the other."""
        return self._joined(self._part(kind, value) for kind, value in items)

    def _part(self, kind: Any, value: Any) -> _Part:
        if kind in (sre.MAX_REPEAT, sre.MIN_REPEAT):
            return self._repeat(*value)
        if kind is sre.SUBPATTERN:
            _, added, removed, items = value
            if added or removed:
                raise PatternRefused("must have no flags")
            return self.sequence(items)
        if kind is sre.BRANCH:
            return self._either([self.sequence(branch) for branch in value[1]])
        if kind is sre.AT:
            return _EMPTY
        if kind is sre.IN:
            value = tuple(value)
            if any(item is sre.RANGE and bounds[1] > _LATIN for item, bounds in value):
                self.wide.add(value)
        return self._position(_accepted(kind, value))

    def _position(self, accepts: Ranges) -> _Part:
        if len(self._accepts) == self._limit:
            raise PatternRefused(
                f"has more than {self._limit} positions: characters and classes, repeats written out"
            )
        self._accepts.append(accepts)
        self._follow.append(set())
        position = (len(self._accepts) - 1,)
        return _Part(nullable=False, first=position, last=position, longest=1)

    def _repeat(self, least: int, most: Any, items: Any) -> _Part:
        unbounded = most is sre.MAXREPEAT
        parts = []
        for _ in range(max(least, 1) if unbounded else most):
            parts.append(self.sequence(items))
            if parts[-1].nullable:
                raise _ambiguous()
        if unbounded:
            looping = parts[-1]
            self._connect(looping.last, looping.first)
            parts[-1] = looping._replace(longest=None, nullable=least == 0)
            return self._joined(parts)
        return self._joined([*parts[:least], self._optional(parts[least:])])

    def _optional(self, parts: list[_Part]) -> _Part:
        """Copies of which any number from the left may come."""
        last = tuple(position for part in parts for position in part.last)
        return self._joined(parts)._replace(nullable=True, last=last)

    def _joined(self, parts: Iterable[_Part]) -> _Part:
        nullable, first, last, longest = _EMPTY
        for part in parts:
            self._connect(last, part.first)
            first = first + part.first if nullable else first
            last = part.last + last if part.nullable else part.last
            nullable = nullable and part.nullable
            longest = None if longest is None or part.longest is None else longest + part.longest
        return _Part(nullable, first, last, longest)

    def _connect(self, last: Iterable[int], first: Iterable[int]) -> None:
        for position in last:
            successors = self._follow[position]
            if not successors.isdisjoint(first):
                raise _ambiguous()
            successors.update(first)

    def _either(self, parts: list[_Part]) -> _Part:
        if sum(part.nullable for part in parts) > 1:
            raise _ambiguous()
        bounds = [part.longest for part in parts]
        return _Part(
            nullable=any(part.nullable for part in parts),
            first=tuple(position for part in parts for position in part.first),
            last=tuple(position for part in parts for position in part.last),
            longest=None if None in bounds else max(bound or 0 for bound in bounds),
        )


def _ambiguous() -> PatternRefused:
    return PatternRefused("is ambiguous: some text matches in two ways, and trying them can take any time")


@functools.lru_cache(maxsize=1024)
def _accepted(kind: Any, value: Any) -> Ranges:
    """The characters that one position accepts; more of them where two engines differ."""
    if kind is sre.ANY:
        return _ANY
    if kind is sre.LITERAL:
        return ((value, value),)
    if kind is sre.NOT_LITERAL:
        return _complement(((value, value),))
    if kind is sre.IN:
        negated = value[0][0] is sre.NEGATE
        items = [_member(*item, narrow=negated) for item in value[negated:]]
        union = _union(ranges for item in items for ranges in item)
        return _complement(union) if negated else union
    raise PatternRefused("uses what is no part of a regular language, such as lookaround or a back reference")


def _member(kind: Any, value: Any, *, narrow: bool) -> Ranges:
    if kind is sre.LITERAL:
        return ((value, value),)
    if kind is sre.RANGE:
        return (value,)
    return _category(value, narrow)


@functools.cache
def _category(name: Any, narrow: bool) -> Ranges:
    r"""`\d`, `\w`, `\s` and their complements: Unicode's in Python, ASCII's in xgrammar.

    Args:
        name: Of Python's parser.
        narrow: Whether the smaller of the two is wanted, not the larger.
    """
    letter = {"DIGIT": "d", "WORD": "w", "SPACE": "s"}[str(name).rpartition("_")[2]]
    if "NOT" in str(name):
        return _complement(_class(letter, not narrow))
    return _class(letter, narrow)


def load_classes() -> None:
    """Computes Unicode's classes, half a second's work, before the first request needs them."""
    for letter in "dws":
        _class(letter, False)


@functools.cache
def _class(letter: str, ascii_only: bool) -> Ranges:
    text = "".join(map(chr, range(128 if ascii_only else _LAST + 1)))
    return tuple((match.start(), match.end() - 1) for match in re.finditer(rf"\{letter}+", text))


def _union(ranges: Iterable[tuple[int, int]]) -> Ranges:
    merged: list[tuple[int, int]] = []
    for low, high in sorted(ranges):
        if merged and low <= merged[-1][1] + 1:
            merged[-1] = (merged[-1][0], max(merged[-1][1], high))
        else:
            merged.append((low, high))
    return tuple(merged)


def _complement(ranges: Ranges) -> Ranges:
    return tuple(_gaps(ranges))


def _gaps(ranges: Ranges) -> Iterator[tuple[int, int]]:
    start = 0
    for low, high in ranges:
        if start < low:
            yield start, low - 1
        start = high + 1
    if start <= _LAST:
        yield start, _LAST


def _overlap(sets: list[Ranges]) -> bool:
    """Whether two of the sets share a character."""
    bounds = sorted(bounds for each in sets for bounds in each)
    return any(later[0] <= earlier[1] for earlier, later in itertools.pairwise(bounds))
