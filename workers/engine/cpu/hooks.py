"""Makes NIXL register KV memory as DRAM.

SGLang tells NIXL that KV memory is VRAM unless `kv_data_mem_kinds` says
otherwise, and UCX then refuses host memory. Both sides of a transfer go
through the constructor hooked here, in 0.5.17 as in 0.5.23.
"""

from __future__ import annotations

from typing import Any

_TARGET = "sglang.srt.disaggregation.nixl.conn.NixlKVManager.__init__"


def register() -> None:
    """Registers the hook with SGLang, which applies it."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(_TARGET, declare_dram, HookType.BEFORE)


def declare_dram(_manager: Any, args: Any, *_rest: Any, **_named: Any) -> None:
    """Runs before `NixlKVManager.__init__(self, args, ...)`."""
    args.kv_data_mem_kinds = ["DRAM"] * len(args.kv_data_ptrs)
