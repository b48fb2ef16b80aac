"""What an examination found."""

from __future__ import annotations

from typing import Literal

import msgspec

Level = Literal["ok", "warn", "fail", "skip"]


class Finding(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One thing that was looked at.

    Attributes:
        name: What.
        level: `fail` stops requests or jobs; `skip` could not be looked at.
        found: What was found, in one line.
        mend: What to do about it; empty where nothing is to be done.
    """

    name: str
    level: Level
    found: str
    mend: str = ""


def ok(name: str, found: str) -> Finding:
    """As it should be."""
    return Finding(name=name, level="ok", found=found)


def warn(name: str, found: str, mend: str) -> Finding:
    """It works, and may not for long or not for everybody."""
    return Finding(name=name, level="warn", found=found, mend=mend)


def fail(name: str, found: str, mend: str) -> Finding:
    """It does not work."""
    return Finding(name=name, level="fail", found=found, mend=mend)


def skip(name: str, why: str) -> Finding:
    """It could not be looked at."""
    return Finding(name=name, level="skip", found=why)
