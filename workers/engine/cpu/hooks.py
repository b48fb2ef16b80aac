"""Makes NIXL register KV memory as DRAM, and its progress thread sleep between polls.

SGLang registers KV memory as VRAM unless `kv_data_mem_kinds` is set, and UCX
then refuses host memory. Both sides of a transfer go through the constructor
hooked here, in 0.5.17 as in 0.5.23.

NIXL's Python binding gives its progress thread no pause at all (`pthrDelay =
0`), so every agent keeps one core busy for as long as it lives: of two cores, a
prefill and a decode engine would leave none to compute on. Measured here: 0.97
of a core without a pause, 0.02 with one of 100 us.
"""

from __future__ import annotations

from typing import Any, Final

PAUSE_MICROSECONDS: Final = 100
"""Between two polls of the progress thread; a transfer may be late by this much."""

_TARGET = "sglang.srt.disaggregation.nixl.conn.NixlKVManager.__init__"


def register() -> None:
    """Registers the hook with SGLang, which applies it."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(_TARGET, prepare_manager, HookType.BEFORE)


def prepare_manager(_manager: Any, args: Any, *_rest: Any, **_named: Any) -> None:
    """Runs before `NixlKVManager.__init__(self, args, ...)`."""
    args.kv_data_mem_kinds = ["DRAM"] * len(args.kv_data_ptrs)
    calm_progress_thread()


def calm_progress_thread() -> None:
    """Has every NIXL agent that this process makes from now on pause between polls."""
    from nixl._api import nixlBind

    plain: Any = nixlBind.nixlAgentConfig
    if getattr(plain, "calm", False):
        return

    class CalmConfig(plain):  # type: ignore[misc]
        """NIXL's own, which its binding fills in field by field."""

        calm = True

        def __setattr__(self, name: str, value: Any) -> None:
            super().__setattr__(name, value or PAUSE_MICROSECONDS if name == "pthrDelay" else value)

    nixlBind.nixlAgentConfig = CalmConfig
