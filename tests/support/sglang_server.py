"""SGLang's own HTTP server, as a user starts it: what the answers of a worker are compared with."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import httpx

from inferbus.workers.engine.cpu import defaults
from inferbus.workers.stack import models
from tests.support.remote_engine import ENVIRONMENT, LAST

HOST = "127.0.0.1"


class SGLangServer:
    """The server in a process that this one starts; it is not waited for.

    Args:
        folder: For the log, and the address.
        argv: Flags, without the model, which is `tiny`.
    """

    def __init__(self, folder: Path, argv: Sequence[str]) -> None:
        self.log = folder / "log"
        self.process: subprocess.Popen[bytes] | None = None
        address = folder / "url"
        if address.exists() and _answers(address.read_text()):  # Left running by an earlier test run.
            self.url = address.read_text()
            return
        folder.mkdir(parents=True, exist_ok=True)
        self.url = f"http://{HOST}:{_free_port()}"
        address.write_text(self.url)
        command = [sys.executable, "-m", "sglang.launch_server", "--model-path", str(models.ensure("tiny"))]
        command += ["--host", HOST, "--port", self.url.rpartition(":")[2], "--nccl-port", str(_free_port())]
        command += ["--served-model-name", "tiny", "--log-level", "warning", "--incremental-streaming-output"]
        for name, value in defaults("both").items():
            flag = f"--{name.replace('_', '-')}"
            command += [flag] if value is True else [flag, str(value)]
        with self.log.open("wb") as output:
            self.process = subprocess.Popen(
                [*LAST, *command, *argv],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                # Without a network SGLang could not find out its own address.
                env=os.environ | ENVIRONMENT | {"SGLANG_HOST_IP": HOST, "SGLANG_CPU_OMP_THREADS_BIND": "0"},
                process_group=0,
            )

    def wait_ready(self, within: float = 800.0) -> None:
        """Waits until it answers."""
        until = time.monotonic() + within
        while not _answers(self.url):
            assert self.process is not None
            if self.process.poll() is not None or time.monotonic() > until:
                self.stop()
                tail = "\n".join(self.log.read_text(errors="replace").splitlines()[-40:])
                raise AssertionError(
                    f"SGLang's server did not start (exit {self.process.returncode}):\n{tail}"
                )
            time.sleep(0.2)

    def stop(self) -> None:
        """Ends the process and everything below it, where it was started here."""
        if self.process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def _answers(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", timeout=5.0, trust_env=False).status_code == httpx.codes.OK
    except httpx.HTTPError:
        return False


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port: int = probe.getsockname()[1]
        return port
