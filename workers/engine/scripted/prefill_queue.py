"""The prompts of a scripted engine: computed one after the other, as the KV cache has room for them."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable


class Place:
    """One leg's place in the queue, and then in the KV cache.

    Args:
        prompt: Its tokens.
        answer: Tokens that it may generate.
        turn: Called when its prompt may be computed.

    Attributes:
        generated: Tokens so far.
    """

    def __init__(self, prompt: int, answer: int, turn: Callable[[], None]) -> None:
        self.prompt = prompt
        self.reserved = prompt + answer
        self.turn = turn
        self.generated = 0


class PrefillQueue:
    """Gives out turns: to one prompt at a time, the highest priority first, then the oldest.

    The one that is next waits until the KV cache holds all that it may need, and everything else behind it;
    alone it starts in any case.

    Args:
        kv_tokens: Tokens of the KV cache.
    """

    def __init__(self, kv_tokens: int) -> None:
        self._kv_tokens = kv_tokens
        self._waiting: list[tuple[int, int, Place]] = []
        self._held: dict[Place, None] = {}
        self._computing: Place | None = None
        self._count = itertools.count()

    @property
    def waiting(self) -> int:
        """Prompts that have not had their turn."""
        return len(self._waiting)

    @property
    def kv_used(self) -> int:
        """Tokens in the KV cache."""
        return sum(place.prompt + place.generated for place in self._held)

    def enter(self, place: Place, *, priority: int = 0) -> None:
        """A prompt arrives."""
        heapq.heappush(self._waiting, (-priority, next(self._count), place))
        self._next()

    def computed(self, place: Place) -> None:
        """Its first token is there."""
        if self._computing is place:
            self._computing = None
            self._next()

    def leave(self, place: Place) -> None:
        """Its leg has ended, wherever it was."""
        if place in self._held:
            del self._held[place]
        else:
            self._waiting = [entry for entry in self._waiting if entry[2] is not place]
            heapq.heapify(self._waiting)
        if self._computing is place:
            self._computing = None
        self._next()

    def _next(self) -> None:
        if self._computing is not None or not self._waiting:
            return
        place = self._waiting[0][2]
        reserved = sum(held.reserved for held in self._held)
        if self._held and reserved + place.reserved > self._kv_tokens:
            return
        heapq.heappop(self._waiting)
        self._held[place] = None
        self._computing = place
        place.turn()
