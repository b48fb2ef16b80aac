"""What prefill workers' logs tell of their hand-offs, and what is known of the way that KV caches take."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

from benchmarks.report import Quantiles
from inferbus.schemas.fleet import Signature

TOLD: Final[dict[str, str]] = {"UCX_PROTO_INFO": "y"}
"""Has UCX say once for each kind of transfer which way it takes; NIXL's wheel brings a UCX that can."""
BYTES: Final = {"float32": 4, "float16": 2, "bfloat16": 2, "fp8_e4m3": 1, "fp8_e5m2": 1}
WRITES: Final = "remote memory write"
_TABLE: Final = re.compile(r"\] +\| (.*) \|$")


class Handoffs(msgspec.Struct, frozen=True, kw_only=True):
    """The hand-offs of one reading.

    Attributes:
        seconds: From taking one to SGLang's word that the cache was sent, in ms: its wait in prefill's queue,
            its computing and its transfer.
        gbytes: KV bytes of a prompt over that time, in GB/s, for the median and for the fastest tenth. Less
            than what the way gives, since the time is more than the transfer's. None: sizes are not known.
        failed: Hand-offs that were refused or failed.
        transfer_seconds: Of the transfers alone, as the engine tells them, in ms. None: it told of none.
        transfer_gbytes: KV bytes sent over that time, in GB/s, for the median and for the fastest tenth.
    """

    seconds: Quantiles | None
    gbytes: dict[str, float] | None
    failed: int
    transfer_seconds: Quantiles | None = None
    transfer_gbytes: dict[str, float] | None = None


class Logs:
    """Reads what prefill workers have logged since it was read last.

    Args:
        logs: By worker; ones that come later can be added.
    """

    def __init__(self, logs: Mapping[str, Path]) -> None:
        self._read: dict[Path, int] = dict.fromkeys(logs.values(), 0)

    def handoffs(self, prompt: int, token_bytes: int | None) -> Handoffs:
        """The hand-offs since the last call.

        Args:
            prompt: Tokens of each prompt.
            token_bytes: Of a token's KV cache.
        """
        events = list(self._new())
        seconds = sorted(event["seconds"] for event in events if event["event"] == "handoff.done")
        speeds = None
        if token_bytes and seconds:
            size = prompt * token_bytes / 1e9
            fast, middle = seconds[len(seconds) // 10], seconds[len(seconds) // 2]
            speeds = {"p50": round(size / middle, 6), "p90": round(size / fast, 6)}
        failed = sum(event["event"] in ("handoff.failed", "handoff.refused") for event in events)
        transfers = [
            (event["transfer_seconds"], event["transfer_bytes"])
            for event in events
            if event.get("transfer_seconds", 0) > 0
        ]
        rates = sorted((size / took / 1e9 for took, size in transfers), reverse=True)
        return Handoffs(
            seconds=Quantiles.of(seconds),
            gbytes=speeds,
            failed=failed,
            transfer_seconds=Quantiles.of(took for took, _ in transfers),
            transfer_gbytes=_speeds(rates) if rates else None,
        )

    def _new(self) -> Iterator[dict[str, Any]]:
        for log, at in self._read.items():
            with log.open("rb") as file:
                file.seek(at)
                data = file.read()
            whole = data.rfind(b"\n") + 1
            self._read[log] = at + whole
            for line in data[:whole].splitlines():
                if line.startswith(b'{"') and b'"event":"handoff.' in line:
                    yield json.loads(line)


def _speeds(rates: list[float]) -> dict[str, float]:
    """The median and the slowest of the fastest tenth, of rates from the fastest on."""
    return {"p50": round(rates[len(rates) // 2], 6), "p90": round(rates[len(rates) // 10], 6)}


def token_bytes(signature: Signature | None) -> int | None:
    """Bytes of a token's KV cache on all layers; None where the engine has none or it is not known."""
    if signature is None or not signature.layers or signature.kv_dtype not in BYTES:
        return None
    return 2 * signature.layers * signature.kv_heads * signature.head_dim * BYTES[signature.kv_dtype]


def ways(log: Path) -> dict[str, list[str]]:
    """What UCX told of the ways that an engine's writes to another process take, by what is written.

    NIXL sends KV caches as such writes; UCX draws a table for each kind of them when it comes up first.
    """
    found: dict[str, list[str]] = {}
    other, what = False, ""
    for line in log.read_text(errors="replace").splitlines() if log.exists() else ():
        if (cells := _TABLE.search(line)) is None:
            continue
        text = re.sub(r"\s+", " ", cells[1]).strip()
        if "cfg#" in text:
            other, what = " self cfg#" not in text, ""
        elif "|" not in cells[1]:
            what = text if other and text.startswith(WRITES) else ""
        elif what and "Config" not in text:
            way = re.sub(r" ?\| ?", ", ", text)
            if way not in found.setdefault(what, []):
                found[what].append(way)
    return found


def links() -> list[str]:
    """How the GPUs of this machine are connected, as `nvidia-smi topo -m` draws it."""
    if shutil.which("nvidia-smi") is None:
        return []
    try:
        done = subprocess.run(["nvidia-smi", "topo", "-m"], capture_output=True, timeout=20, text=True)
    except (OSError, subprocess.SubprocessError):
        return []
    plain = re.sub(r"\x1b\[[0-9;]*m", "", done.stdout)
    return [line.rstrip() for line in plain.splitlines() if line.startswith(("GPU", "\tGPU"))]
