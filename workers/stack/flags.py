"""SGLang's flags and environment for two engines of a small model that share one machine."""

from __future__ import annotations

import os
import shutil
import subprocess
from typing import Final

import msgspec

from inferbus.schemas.fleet import Role

PROBE_TIMEOUT: Final = 20.0
TOKENS: Final = {"cpu": 16_384, "gpu": 65_536}
"""Room in each KV cache. Two engines on one GPU are kept apart by this cap: SGLang's own share of the memory
counts what is free when an engine starts, and both start at once."""
RESERVED: Final = "--num-reserved-decode-tokens"
RESERVED_TOKENS: Final = "128"
"""Room that a decode engine keeps free for every running request while it takes new ones. SGLang's 512 leaves
half of a cache as small as these unused; with long answers it may run short, and then SGLang puts a request
aside and goes on with it later."""


class Placement(msgspec.Struct, frozen=True, kw_only=True):
    """Where the engines run.

    Attributes:
        where: For people.
        flags: For every engine.
        role_flags: For the engines of one role.
        env: For the processes; None takes a variable away.
    """

    where: str
    flags: list[str]
    role_flags: dict[Role, list[str]]
    env: dict[str, str | None]


def placement(*, shared: bool = False) -> Placement:
    """Prefill and decode on a GPU each, on one GPU, or on the CPU; `INFERBUS_CPU=1` asks for the CPU.

    Args:
        shared: One GPU for both, where there are more, too.
    """
    gpus = 0 if os.environ.get("INFERBUS_CPU") == "1" else _gpus()
    if shared:
        gpus = min(gpus, 1)
    role_flags: dict[int, dict[Role, list[str]]] = {0: {}, 1: {"decode": [RESERVED, RESERVED_TOKENS]}}
    return Placement(
        where={0: "the CPU", 1: "one GPU"}.get(gpus, "two GPUs"),
        flags=["--max-total-tokens", str(TOKENS["gpu" if gpus else "cpu"])],
        role_flags=role_flags.get(gpus, {"decode": ["--base-gpu-id", "1"]}),
        env={} if gpus else {"CUDA_VISIBLE_DEVICES": ""},
    )


def _gpus() -> int:
    """How many NVIDIA GPUs there are, without loading PyTorch for that."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return 0
    command = [program, "-L"]
    try:
        listed = subprocess.run(command, capture_output=True, timeout=PROBE_TIMEOUT, check=True, text=True)  # noqa: S603
    except (OSError, subprocess.SubprocessError):
        return 0
    return sum(line.startswith("GPU ") for line in listed.stdout.splitlines())
