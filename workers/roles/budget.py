"""What a worker may hold, from its settings and what its engine tells of itself."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from inferbus.schemas.fleet import Capacity, Role, WorkerInfo
from inferbus.workers.admission import Budget
from inferbus.workers.config import WorkerSettings

STEPS: Final = 2
"""Steps of prompts that are ahead in an engine of the role `both`: the one that SGLang has planned behind the
step under way, and the next. With three, 334 requests ran at once instead of 200, in longer steps, and 1,200
jobs took 27 s instead of 23 (one H200, docs/admission.md)."""

PREFILL_STEPS: Final = 12
"""The same for prefill: a prompt counts until its KV cache was sent, which takes some steps more."""


def budget(role: Role, capacity: Capacity, settings: WorkerSettings) -> Budget:
    """The budgets of a worker.

    Args:
        role: Of the worker.
        capacity: Of its engine.
        settings: Of the worker.
    """
    steps = STEPS if role == "both" else PREFILL_STEPS
    window = settings.prompt_window or _step(capacity) * steps
    return Budget(
        slots=settings.slots or capacity.max_running,
        kv_tokens=capacity.kv_tokens,
        window=window,
        # A third of the window is prepared beyond it, so that the next prompt is ready in time.
        staged=window // 3,
        live_share=settings.live_share,
    )


def paired_window(workers: Iterable[WorkerInfo]) -> int:
    """The prompt window of a decode worker beside these prefill workers."""
    return sum(_step(info.capacity) * PREFILL_STEPS for info in workers if info.capacity is not None)


def _step(capacity: Capacity) -> int:
    """Tokens of one prefill step."""
    return capacity.step_tokens or capacity.max_prefill_tokens
