"""Whether a live request's caller is still there: the server reports messages that reach nobody."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from inferbus.schemas.errors import Cancelled
from inferbus.workers.jobs.scope import Scope

OpenProbe = Callable[[Callable[[str], None]], str]
"""Opens a reply subject for probing. The callback gets the subject of every message sent with it that reached
no subscriber."""


class Listeners:
    """Ends live attempts that nobody listens to any more.

    Args:
        open_probe: None: callers are not probed.
        every: Probe with every k-th message of a reply.

    Attributes:
        probe: Reply subject to probe with; empty where callers are not probed.
        every: See above.
    """

    def __init__(self, open_probe: OpenProbe | None = None, *, every: int = 16) -> None:
        self.every = every
        self._scopes: dict[str, Scope] = {}
        self.probe = open_probe(self._gone) if open_probe is not None else ""

    @contextmanager
    def expected(self, reply: str, scope: Scope) -> Iterator[None]:
        """While the block runs, `scope` is ended when its reply subject has no subscriber."""
        self._scopes[reply] = scope
        try:
            yield
        finally:
            self._scopes.pop(reply, None)

    def _gone(self, reply: str) -> None:
        scope = self._scopes.get(reply)
        if scope is not None:
            scope.end(Cancelled("nobody listens on the reply subject any more"))
