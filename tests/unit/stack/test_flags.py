"""Where the local stack puts its engines."""

from __future__ import annotations

from pathlib import Path

import pytest

from inferbus.workers.stack.flags import placement


@pytest.fixture
def smi(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A program `nvidia-smi`, to be written."""
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.delenv("INFERBUS_CPU", raising=False)
    program = tmp_path / "nvidia-smi"
    program.touch(0o755)
    return program


@pytest.mark.parametrize(("gpus", "where"), [(1, "one GPU"), (2, "two GPUs"), (8, "two GPUs")])
def test_engines_go_to_the_gpus_that_nvidia_smi_lists(smi: Path, gpus: int, where: str) -> None:
    smi.write_text("#!/bin/sh\n" + "".join(f"echo 'GPU {n}: NVIDIA H200'\n" for n in range(gpus)))
    found = placement()
    assert (found.where, found.env) == (where, {})
    assert ("--base-gpu-id" in found.role_flags["decode"]) == (gpus > 1)
    assert placement(shared=True).where == "one GPU"


def test_engines_go_to_the_cpu_where_the_driver_does_not_answer(smi: Path) -> None:
    smi.write_text("#!/bin/sh\nexit 9\n")
    found = placement()
    assert (found.where, found.role_flags) == ("the CPU", {})
    assert found.env == {"CUDA_VISIBLE_DEVICES": ""}
