"""SGLang's server arguments and environment on a CPU, where the user gives none."""

from __future__ import annotations

import importlib.metadata
import os
from typing import Any, Final

from inferbus.schemas.fleet import Role

KV_TOKENS: Final = 32_768
"""SGLang would take a share of all memory for the KV cache; on a laptop it has to stay small."""

GRAMMARS_SINCE: Final = (0, 5, 23)

RUNNING: Final = 64
"""Requests at once: more of them only wait for each other on a CPU."""


def defaults(role: Role) -> dict[str, Any]:
    """Server arguments by field name.

    float32 because bfloat16 is two to three times slower without AVX-512. Fields that an older SGLang
    does not have (the retraction backup) are for the caller to leave out.
    """
    values: dict[str, Any] = {
        "device": "cpu",
        "dtype": "float32",
        "attention_backend": "torch_native",
        "sampling_backend": "pytorch",
        "disable_cuda_graph": True,
        "disable_overlap_schedule": True,
        "max_total_tokens": KV_TOKENS,
        "max_running_requests": RUNNING,
        "skip_server_warmup": True,
        # Schedulers spin while they wait otherwise, and take the cores from whoever works.
        "sleep_on_idle": True,
    }
    if not _has_cpu_grammars():
        values["grammar_backend"] = "none"
    if role == "decode":
        values["disaggregation_decode_retraction_backup"] = "cpu_tensor"
    return values


def _has_cpu_grammars() -> bool:
    """Whether SGLang can use grammars without a GPU; older ones would let a request kill the engine."""
    version = importlib.metadata.version("sglang").split(".")
    return tuple(int("".join(filter(str.isdigit, part)) or 0) for part in version[:3]) >= GRAMMARS_SINCE


def prepare_environment(ranks: int) -> None:
    """Sets environment variables for the engine's processes; the user's own settings stay.

    PyTorch takes all cores for every process, and the processes of two engines on one machine then
    fight for them: measured on two cores, 0.81 of the throughput that one thread each gives. The
    binding names a group of cores for every rank; SGLang otherwise takes no more ranks than there are
    NUMA nodes.
    """
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // 4)))
    os.environ.setdefault("SGLANG_CPU_OMP_THREADS_BIND", "|".join(map(str, range(ranks))))
