"""SGLang on a CPU, through its out-of-tree platform interface; inert wherever there is an accelerator.

SGLang's own CPU engine needs kernels (`sgl_kernel`) that exist for AMX and
AVX-512 alone and are not on PyPI. As an out-of-tree platform with native
PyTorch forwards it runs on any x86-64 CPU, prefill and decode over NIXL
included, which is what a laptop and CI need.

SGLang finds both functions by the entry points in pyproject.toml, in every
process of an engine. Importing this module imports neither torch nor SGLang.
"""

from __future__ import annotations

from inferbus.workers.engine.cpu.defaults import defaults, prepare_environment
from inferbus.workers.engine.cpu.detect import cpu_only

__all__ = ["activate", "cpu_only", "defaults", "install_hooks", "prepare_environment"]


def activate() -> str | None:
    """The platform class for SGLang to load, or None where something better than a CPU is there."""
    return "inferbus.workers.engine.cpu.platform.InferbusCpuPlatform" if cpu_only() else None


def install_hooks() -> None:
    """Registers the hook that makes NIXL see KV memory for what it is."""
    if cpu_only():
        from inferbus.workers.engine.cpu.hooks import register

        register()
