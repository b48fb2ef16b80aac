"""Admission with nothing but slots, for tests that are not about the engine's budgets."""

from __future__ import annotations

from inferbus.workers.admission import Admission, Budget


def slots(total: int, *, live_share: float = 0.0) -> Admission:
    """So many requests at once, of any size."""
    return Admission(Budget(slots=total, kv_tokens=10**9, window=10**9, staged=10**9, live_share=live_share))
