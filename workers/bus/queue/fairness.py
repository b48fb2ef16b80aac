"""Which class of jobs comes next: in proportion to weights, so that none starves.

Smooth weighted round robin: of 4:1, every fifth job is the lighter class's as
long as both have jobs. A class without jobs gathers no credit.
"""

from __future__ import annotations

from collections.abc import Mapping


class Fair:
    """Keeps the credit of each class."""

    def __init__(self, weights: Mapping[str, int]) -> None:
        self._weights = dict(weights)
        self._credit = dict.fromkeys(weights, 0)

    def order(self) -> list[str]:
        """The classes in the order in which they should be asked for a job."""
        return sorted(self._weights, key=lambda name: -(self._credit[name] + self._weights[name]))

    def picked(self, name: str) -> None:
        """A job of this class was taken."""
        for each, weight in self._weights.items():
            self._credit[each] += weight
        self._credit[name] -= sum(self._weights.values())
        # Bounded, so that a class that was long alone is not shut out afterwards.
        bound = sum(self._weights.values())
        for each, credit in self._credit.items():
            self._credit[each] = max(-bound, min(bound, credit))

    def empty(self, name: str) -> None:
        """This class has no job at the moment."""
        self._credit[name] = 0
