"""Defaults for SGLang's scheduler: urgent requests first, and short steps.

A first token waits for the step under way, for the one that SGLang has planned behind it, and for its own. So
the length of a step decides how long a live request waits beside a batch, and how far apart its tokens are.
`docs/performance.md` has the readings behind `STEP_TOKENS`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from inferbus.schemas.fleet import Role
from inferbus.workers.admission.classes import PREEMPTION_THRESHOLD

STEP_TOKENS: Final = 1536
"""Tokens of one step of an engine that computes prompts and answers: new tokens of the running requests, and
as much of waiting prompts as fits beside them."""

PREFILL_STEP_TOKENS: Final = 2048
"""Tokens of one step of a prefill engine."""

_ORDERED_POLICIES: Final = ("fcfs", "lof")
"""Of SGLang's schedule policies, those that know priorities."""


def defaults(role: Role, given: Mapping[str, Any], *, gpu: bool) -> dict[str, Any]:
    """Server arguments by field name.

    Args:
        role: Of the worker.
        given: The user's own.
        gpu: Whether the engine runs on one. Steps on a CPU stay as SGLang has them.
    """
    values: dict[str, Any] = {}
    if given.get("schedule_policy", "fcfs") in _ORDERED_POLICIES:
        values |= {
            "enable_priority_scheduling": True,
            "default_priority_value": 0,
            "priority_scheduling_preemption_threshold": PREEMPTION_THRESHOLD,
            "retraction_policy": "priority",
        }
    if not gpu:
        return values
    if role == "both":
        values["chunked_prefill_size"] = STEP_TOKENS
        if given.get("chunked_prefill_size", STEP_TOKENS) > 0 and "speculative_algorithm" not in given:
            # Running requests then take part in every step, instead of waiting while prompts are computed.
            values["enable_mixed_chunk"] = True
    elif role == "prefill":
        values["chunked_prefill_size"] = PREFILL_STEP_TOKENS
    return values
