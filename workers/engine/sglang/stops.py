"""Stop strings, made visible to SGLang however a model splits them into tokens.

SGLang looks for a stop string in the text of as many of the last tokens as the
string has when it is tokenised as a whole, plus one, and holds back text that
may be its beginning over the same window. Where a model generates the string in
more tokens than that, SGLang neither stops nor trims. The window is also as long
as the longest text that a stop pattern can match, so a pattern that never
matches, but could match that many characters, makes it long enough.
"""

from __future__ import annotations

from collections.abc import Sequence

from inferbus.schemas import limits


def with_reach(stops: str | Sequence[str], patterns: str | Sequence[str] | None) -> list[str]:
    r"""The stop patterns of a request with such stop strings.

    A token stands for at least one byte, so the bytes of the longest string are tokens enough. Nothing
    follows the end of a text (`\Z`), so the added pattern matches nothing.
    """
    stops = [stops] if isinstance(stops, str) else stops
    own = [patterns] if isinstance(patterns, str) else list(patterns or ())
    longest = max((len(stop.encode("utf-8", "replace")) for stop in stops), default=0)
    if not longest or len(own) >= limits.STOP_STRINGS:
        return own
    return [*own, rf"\Z.{{{longest}}}"]
