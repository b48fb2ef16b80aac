"""A transfer by NIXL between two agents of one process, in host memory."""

from __future__ import annotations

import ctypes
import time
from typing import Any, Final

SIZE: Final = 64 * 1024
SECONDS: Final = 20.0


def transfer() -> str | None:
    """Moves memory as a prefill worker does; returns why that failed, None where it worked."""
    from nixl._api import nixl_agent

    sender, receiver = nixl_agent("sender"), nixl_agent("receiver")
    here, there = bytearray(b"\x5a" * SIZE), bytearray(SIZE)
    for agent, memory in ((sender, here), (receiver, there)):
        agent.register_memory([(*_region(memory), "")], "DRAM")
    peer = sender.add_remote_agent(receiver.get_agent_metadata())
    local, remote = (sender.get_xfer_descs([_region(each)], "DRAM") for each in (here, there))
    handle = sender.initialize_xfer("WRITE", local, remote, peer)
    state: Any = sender.transfer(handle)
    until = time.monotonic() + SECONDS
    while state == "PROC" and time.monotonic() < until:
        time.sleep(0.001)
        state = sender.check_xfer_state(handle)
    if state != "DONE":
        return f"the transfer ended as {state}"
    return None if here == there else "other bytes arrived than were sent"


def _region(memory: bytearray) -> tuple[int, int, int]:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory)), len(memory), 0
