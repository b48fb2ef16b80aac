"""The differences between inferbus and SGLang's server that are meant to be."""

from __future__ import annotations

from typing import Final

import msgspec

from tests.engine.parity.told import Difference


class Wanted(msgspec.Struct, frozen=True, kw_only=True):
    """One of them, as docs/openai.md shows it.

    Attributes:
        what: The request, or the field.
        sglang: What SGLang's server does.
        inferbus: What inferbus does.
        reason: Why.
        paths: Of the fields that differ.
        cases: Where; empty: wherever it occurs.
    """

    what: str
    sglang: str
    inferbus: str
    reason: str
    paths: tuple[str, ...]
    cases: tuple[str, ...] = ()


WANTED: Final[tuple[Wanted, ...]] = ()


def wanted_by(case: str, difference: Difference) -> Wanted | None:
    """The entry that a difference belongs to; None: it is not wanted."""
    fitting = (each for each in WANTED if difference.path in each.paths)
    return next((each for each in fitting if not each.cases or case in each.cases), None)
