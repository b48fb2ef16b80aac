"""The health of an engine: whether its processes live and its scheduler answers."""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from contextlib import aclosing
from typing import Any, Final

from inferbus.schemas.fleet import Role
from inferbus.workers.engine.sglang import processes

FRESH_SECONDS: Final = 10.0
"""An engine whose scheduler answered within this time needs no probe."""

PROBE_SECONDS: Final = 10.0

FIRST_SECONDS: Final = 300.0
"""For the first token of all, for which a GPU may have to compile kernels."""


async def healthy(engine: Any, role: Role, *, fresh: float = FRESH_SECONDS) -> bool:
    """Whether its processes live, and its scheduler answers."""
    if not processes.alive(engine.get_all_child_pids()):
        return False
    manager = engine.tokenizer_manager
    asked = time.time()
    if asked - manager.last_receive_tstamp < fresh:
        return True
    with contextlib.suppress(TimeoutError):
        await probe(manager, role, within=PROBE_SECONDS)
    # Any answer since then will do; a busy scheduler skips probes.
    return bool(manager.last_receive_tstamp >= asked)


async def probe(manager: Any, role: Role, *, within: float) -> None:
    """Has the engine compute a token, or embedding, as SGLang's health check does: without a peer in a pair.

    Raises:
        TimeoutError: It took longer.
    """
    async with asyncio.timeout(within):
        await _one_token(manager, role)


async def _one_token(manager: Any, role: Role) -> None:
    from sglang.srt.constants import HEALTH_CHECK_RID_PREFIX
    from sglang.srt.disaggregation.utils import FAKE_BOOTSTRAP_HOST
    from sglang.srt.managers.io_struct import EmbeddingReqInput, GenerateReqInput

    request: Any
    fields: dict[str, Any] = {
        "rid": f"{HEALTH_CHECK_RID_PREFIX}_{uuid.uuid4().hex}",
        "input_ids": [0],
        "sampling_params": {"max_new_tokens": 1, "temperature": 0.0},
        "log_metrics": False,
    }
    if manager.is_generation:
        request = GenerateReqInput(**fields, stream=True)
    else:
        request = EmbeddingReqInput(**fields)
    if role != "both":
        request.bootstrap_host = FAKE_BOOTSTRAP_HOST
        request.bootstrap_room = 0
    try:
        async with aclosing(manager.generate_request(request, None)) as outputs:
            async for _ in outputs:
                return
    finally:
        # The scheduler does not answer a probe's abort, so the manager would keep its state.
        manager.rid_to_state.pop(request.rid, None)
