"""How `pytest -n 2` shares the tests out: those that share engines are one piece, every other file is one."""

from __future__ import annotations

from xdist.scheduler import LoadScopeScheduling


class Lanes(LoadScopeScheduling):
    """Pieces in the order of collection: the longest of them is to begin first."""

    def _split_scope(self, nodeid: str) -> str:
        return "tests/engine" if nodeid.startswith("tests/engine/") else nodeid.partition("::")[0]
