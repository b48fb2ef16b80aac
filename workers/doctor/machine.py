"""This machine, as a worker would find it: versions, GPUs, and a transfer by NIXL.

What may crash or take long runs in a process of its own.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import re
import sys
from typing import Final

from inferbus.workers.doctor.findings import Finding, fail, ok, skip, warn
from inferbus.workers.engine import SGLANG_PYTHONS
from inferbus.workers.engine.sglang.startup import LaunchFailed, installed_version

NIXL_OLDEST: Final = (1, 5)
PATIENCE: Final = 120.0
"""Seconds for importing torch on a slow disk."""

_GPU: Final = """
import torch
for number in range(torch.cuda.device_count()):
    found = torch.cuda.get_device_properties(number)
    print(f"{found.name} ({found.total_memory >> 30} GiB)")
"""
_TRANSFER: Final = """
import sys
from inferbus.workers.doctor.transfer import transfer
sys.exit(transfer())
"""
_INSTALL: Final = "pip install 'inferbus[gpu]'; without a GPU, requirements/cpu.txt"


async def check() -> list[Finding]:
    """Everything that a worker with SGLang needs of this machine."""
    found = [_python(), _sglang(), _nixl(), _torch()]
    installed = {name: _version(name) is not None for name in ("torch", "nixl")}
    found.append(await _gpu() if installed["torch"] else skip("gpu", "torch is not installed"))
    found.append(await _moved() if installed["nixl"] else skip("transfer", "NIXL is not installed"))
    return found


def _python() -> Finding:
    this = ".".join(map(str, sys.version_info[:3]))
    if sys.version_info[:2] in SGLANG_PYTHONS:
        return ok("python", this)
    return warn("python", f"{this}; SGLang has none for it", "run workers with Python 3.11 or 3.12")


def _sglang() -> Finding:
    try:
        return ok("sglang", installed_version())
    except LaunchFailed as error:
        return fail("sglang", error.message, _INSTALL)


def _nixl() -> Finding:
    version = _version("nixl")
    if version is None:
        return fail("nixl", "not installed", _INSTALL)
    if _numbers(version) < NIXL_OLDEST:
        return fail("nixl", f"{version}; 1.5 or later is supported", "pip install --upgrade nixl")
    return ok("nixl", version)


def _torch() -> Finding:
    version = _version("torch")
    if version is None:
        return fail("torch", "not installed", _INSTALL)
    needed = _pinned("sglang", "torch")
    if needed is not None and version.partition("+")[0] != needed:
        return warn("torch", f"{version}; SGLang asks for {needed}", f"pip install torch=={needed}")
    return ok("torch", version)


async def _gpu() -> Finding:
    code, said = await _run(_GPU)
    if code != 0:
        return fail("gpu", f"torch cannot look for GPUs: {said}", "check the driver: nvidia-smi")
    if not said:
        return warn("gpu", "torch sees none: workers compute on the CPU", "check the driver: nvidia-smi")
    return ok("gpu", ", ".join(said.splitlines()))


async def _moved() -> Finding:
    code, said = await _run(_TRANSFER)
    if code == 0:
        return ok("transfer", "NIXL moved memory between two agents of this machine")
    return fail(
        "transfer",
        f"NIXL moved nothing: {said.splitlines()[-1] if said else f'exit code {code}'}",
        "check UCX: UCX_TLS and UCX_NET_DEVICES, and the locked memory allowed (ulimit -l)",
    )


async def _run(code: str) -> tuple[int, str]:
    """Runs Python in a process of its own; its exit code and what it printed, or wrote where it failed."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", code), stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    try:
        async with asyncio.timeout(PATIENCE):
            out, errors = await process.communicate()
    except TimeoutError:
        process.kill()
        await process.wait()
        return -1, f"no answer within {PATIENCE:.0f} s"
    status = process.returncode or 0
    return status, (out if status == 0 else errors).decode(errors="replace").strip()


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _pinned(package: str, dependency: str) -> str | None:
    """The version that a package asks for exactly; None where it does not."""
    try:
        required = importlib.metadata.requires(package) or []
    except importlib.metadata.PackageNotFoundError:
        return None
    pins = (re.fullmatch(rf"{dependency}==([\w.]+)", each.partition(";")[0].strip()) for each in required)
    return next((pin[1] for pin in pins if pin), None)


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:2])
