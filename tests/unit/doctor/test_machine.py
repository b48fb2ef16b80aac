"""What `inferbus doctor` says of machines that lack something."""

from __future__ import annotations

import importlib.metadata
import sys

import pytest

from inferbus.workers.doctor import machine
from inferbus.workers.doctor.findings import Finding


def installed(monkeypatch: pytest.MonkeyPatch, **versions: str) -> None:
    """Has these packages installed, and no others; SGLang asks for torch 2.9.1."""

    def version(name: str) -> str:
        if name not in versions:
            raise importlib.metadata.PackageNotFoundError(name)
        return versions[name]

    def requires(name: str) -> list[str]:
        version(name)
        return ["torch==2.9.1", "nixl"]

    monkeypatch.setattr(importlib.metadata, "version", version)
    monkeypatch.setattr(importlib.metadata, "requires", requires)


async def found(monkeypatch: pytest.MonkeyPatch, gpu: str, transfer: str) -> dict[str, Finding]:
    """All findings, with programs in place of those that look for GPUs and move memory."""
    monkeypatch.setattr(machine, "_GPU", gpu)
    monkeypatch.setattr(machine, "_TRANSFER", transfer)
    return {each.name: each for each in await machine.check()}


async def test_a_machine_without_packages_is_told_how_to_install_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    installed(monkeypatch)
    monkeypatch.setattr(sys, "version_info", (3, 14, 0, "final", 0))
    findings = await found(monkeypatch, "", "")
    assert {name: each.level for name, each in findings.items()} == {
        "python": "warn",
        "sglang": "fail",
        "nixl": "fail",
        "torch": "fail",
        "gpu": "skip",
        "transfer": "skip",
    }
    assert all("pip install" in findings[name].mend for name in ("sglang", "nixl", "torch"))


async def test_versions_that_do_not_fit_and_parts_that_fail_are_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    installed(monkeypatch, sglang="0.5.23", torch="2.8.0+cpu", nixl="1.4.9")
    findings = await found(monkeypatch, "raise SystemExit('no driver')", "raise SystemExit('no UCX')")
    assert (findings["torch"].level, findings["nixl"].level) == ("warn", "fail")
    assert "2.9.1" in findings["torch"].mend
    assert findings["gpu"].found == "torch cannot look for GPUs: no driver"
    assert findings["transfer"].found == "NIXL moved nothing: no UCX"


async def test_gpus_are_listed_and_what_takes_too_long_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch, sglang="0.5.23", torch="2.9.1", nixl="1.5.0")
    monkeypatch.setattr(machine, "PATIENCE", 2.0)
    findings = await found(monkeypatch, "print('H200 (139 GiB)')", "import time; time.sleep(600)")
    assert (findings["torch"].level, findings["nixl"].level) == ("ok", "ok")
    assert (findings["gpu"].level, findings["gpu"].found) == ("ok", "H200 (139 GiB)")
    assert findings["transfer"].found == "NIXL moved nothing: no answer within 2 s"
