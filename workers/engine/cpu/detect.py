"""Whether a CPU is all there is."""

from __future__ import annotations

import functools
import os

_ACCELERATORS = ("xpu", "mps", "npu", "musa", "hpu")


@functools.cache
def cpu_only() -> bool:
    """Whether no accelerator that SGLang knows is available to this process.

    `SGLANG_USE_CPU_ENGINE=1` asks for SGLang's own CPU engine, whose kernels the user then has.
    """
    if os.environ.get("SGLANG_USE_CPU_ENGINE", "0") == "1":
        return False
    import torch

    if torch.cuda.is_available():
        return False
    for name in _ACCELERATORS:
        module = getattr(torch, name, None)
        if module is not None and hasattr(module, "is_available") and module.is_available():
            return False
    return True
