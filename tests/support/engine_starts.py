"""Tries to start engines in ways that cannot work, and prints what came of each: a JSON object a line.

    python -m tests.support.engine_starts MODEL BROKEN_MODEL

In a process of its own because importing SGLang takes half a minute and changes its process.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import socket
import sys
from typing import Any

from inferbus.schemas.fleet import Role
from inferbus.workers.engine import cpu
from inferbus.workers.engine.sglang import LaunchFailed, SGLangEngine, options, processes


async def failing(name: str, role: Role, argv: list[str], **more: Any) -> None:
    """Prints why a start failed, and what it left behind."""
    root = logging.getLogger()
    before = (root.handlers[:], root.level)
    try:
        engine = await SGLangEngine.launch(argv, role=role, **more)
    except LaunchFailed as error:
        reason = error.message
    else:
        reason = "it started"
        await engine.close()
    # The resource tracker of multiprocessing stays, by design, until this process ends.
    left = [pid for pid in processes.descendants() if "resource_tracker" not in _command(pid)]
    told = {
        "case": name,
        "reason": reason,
        "left": len(left),
        "logging": before == (root.handlers[:], root.level),
        "sigterm": signal.getsignal(signal.SIGTERM) is signal.SIG_DFL,
    }
    _tell(told)


def chosen(name: str, role: Role, argv: list[str], **more: Any) -> None:
    """Prints the server arguments that a start would use."""
    read = options.read(argv, role=role, **more)
    fields = (
        "device",
        "dtype",
        "attention_backend",
        "disaggregation_mode",
        "disaggregation_transfer_backend",
        "incremental_streaming_output",
        "tool_call_parser",
        "served_model_name",
        "tp_size",
        "host",
        "disaggregation_bootstrap_port",
        "max_total_tokens",
    )
    told = {field: getattr(read.arguments, field) for field in fields}
    _tell({"case": name, **told, "bootstrap": read.bootstrap and [read.bootstrap.host, read.bootstrap.port]})


def _command(pid: int) -> str:
    with open(f"/proc/{pid}/cmdline") as file:
        return file.read()


def _tell(told: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(told) + "\n")
    sys.stdout.flush()


async def main(model: str, broken: str) -> None:
    """All cases."""
    logging.basicConfig(level=logging.INFO)
    # Nothing listens there; read when SGLang is imported.
    os.environ["HF_ENDPOINT"] = "http://127.0.0.1:9"
    good = ["--model-path", model]
    await failing("unknown flag", "both", [*good, "--no-such-flag"])
    await failing("bad value", "both", [*good, "--tp-size", "many"])
    await failing("no model", "both", [])
    await failing("other mode", "decode", [*good, "--disaggregation-mode", "prefill"])
    await failing("follower", "both", [*good, "--nnodes", "2", "--node-rank", "1"])
    await failing("other name", "both", [*good, "--served-model-name", "a"], model="b")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        await failing("port in use", "prefill", good, bootstrap_port=port, advertise_host="127.0.0.1")
    chosen("decode", "decode", [*good, "--dtype", "bfloat16", "--tp", "2"], model="mine")
    chosen("prefill", "prefill", good, advertise_host="127.0.0.1")
    chosen("prefill everywhere", "prefill", [*good, "--disaggregation-bootstrap-port", "18123"])
    _tell({"case": "environment", "host ip": os.environ.get("SGLANG_HOST_IP"), "cpu": cpu.cpu_only()})
    await failing("wrong path", "both", ["--model-path", "/nonexistent/model"])
    await failing("secret", "both", ["--model-path", "/nonexistent/model", "--api-key", "sk-0815"])
    await failing("misspelt secret", "both", [*good, "--api-keyy", "sk-0815", "--adminn-key=sk-0815"])
    await failing("no hub", "both", ["--model-path", "nobody/no-such-model", "--api-key", "sk-0815"])
    # One real start, whose scheduler cannot load the weights.
    await failing("no weights", "both", ["--model-path", broken])


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
