"""Stop strings that SGLang does not see.

SGLang looks for a stop string in the text of as many of the last tokens as the
string itself has when it is tokenised. A model that says it in smaller pieces
gets past that, and the string goes out (trial D6). Its detokenizer holds back
text that may be the beginning of one, so a whole one arrives in one piece.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopWatch:
    """Looks for stop strings in the text of one choice.

    Args:
        stops: The strings.
        keep: Whether the one that is found stays in the text (`no_stop_trim`).
    """

    def __init__(self, stops: str | Sequence[str], *, keep: bool) -> None:
        self._stops = [stops] if isinstance(stops, str) else [stop for stop in stops if stop]
        self._keep = keep
        self._reach = max((len(stop) for stop in self._stops), default=1) - 1
        self._tail = ""

    def feed(self, text: str) -> tuple[str, str | None]:
        """New text as far as it may go out, and the stop string that ends it, if one does."""
        known = len(self._tail)
        seen = self._tail + text
        found = [(seen.find(stop), stop) for stop in self._stops if stop in seen]
        if not found:
            self._tail = seen[-self._reach :] if self._reach else ""
            return text, None
        at, stop = min(found)
        end = at + len(stop) if self._keep else at
        return seen[known : max(known, end)], stop
