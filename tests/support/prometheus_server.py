"""A real Prometheus: the one on PATH, else Debian's package, unpacked into the cache."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import socket
import subprocess
import tempfile
import urllib.parse
import urllib.request
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from inferbus.workers.stack.processes import Children, spawn
from tests.support.eventually import eventually

CACHE = Path(__file__).parents[2] / ".cache" / "prometheus"


def program(name: str) -> Path | None:
    """`prometheus` or `promtool`; None where it is not here and cannot be had."""
    if found := shutil.which(name):
        return Path(found)
    if not CACHE.exists() and shutil.which("apt-get") and shutil.which("dpkg"):
        _unpack()
    unpacked = CACHE / "usr" / "bin" / name
    return unpacked if unpacked.exists() else None


def _unpack() -> None:
    """Debian's package, into the cache; the system's own packages and lists stay as they are."""
    CACHE.parent.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=CACHE.parent) as directory:
        apt = ["apt-get", "-qq", "-o", "Acquire::http::Timeout=10", "-o", "Acquire::Retries=0"]
        if os.geteuid() == 0:
            # Its usual user may not be able to write here.
            apt += ["-o", "APT::Sandbox::User=root"]
        # A new machine has no lists of what there is.
        for needed in ("lists/partial", "archives/partial"):
            Path(directory, needed).mkdir(parents=True)
        lists = ["-o", f"Dir::State::Lists={directory}/lists", "-o", f"Dir::Cache={directory}"]

        def run(*command: str) -> bool:
            try:
                return not subprocess.run(command, cwd=directory, capture_output=True, timeout=40).returncode
            except subprocess.TimeoutExpired:
                return False

        if run(*apt, "download", "prometheus") or (
            run(*apt, *lists, "update") and run(*apt, *lists, "download", "prometheus")
        ):
            package = next(Path(directory).glob("prometheus_*.deb"))
            # Another process may unpack at the same time: the first one to be done wins.
            if run("dpkg", "-x", str(package), "unpacked") and not CACHE.exists():
                with contextlib.suppress(OSError):
                    Path(directory, "unpacked").rename(CACHE)


class Prometheus:
    """One that scrapes.

    Args:
        url: Where it answers.
    """

    def __init__(self, url: str) -> None:
        self._url = url

    async def series(self, expression: str) -> list[tuple[dict[str, str], float]]:
        """Labels and value of each series of an expression now."""
        answer = await self._get("query?" + urllib.parse.urlencode({"query": expression}))
        return [(each["metric"], float(each["value"][1])) for each in answer["data"]["result"]]

    async def ready(self) -> bool:
        """Whether it answers."""
        try:
            await self._get("query?query=1")
        except OSError:
            return False
        return True

    async def _get(self, path: str) -> Any:
        def get() -> Any:
            with urllib.request.urlopen(f"{self._url}/api/v1/{path}", timeout=10) as answer:
                return json.load(answer)

        return await asyncio.to_thread(get)


@asynccontextmanager
async def prometheus(binary: Path, directory: Path, ports: Sequence[int]) -> AsyncIterator[Prometheus]:
    """Scrapes these ports of this machine every second."""
    targets = ", ".join(f'"127.0.0.1:{port}"' for port in ports)
    file = directory / "prometheus.yml"
    file.write_text(
        "global: {scrape_interval: 1s, scrape_timeout: 1s}\n"
        f"scrape_configs: [{{job_name: inferbus, static_configs: [{{targets: [{targets}]}}]}}]\n"
    )
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    command = [
        str(binary),
        f"--config.file={file}",
        f"--web.listen-address={address}",
        f"--storage.tsdb.path={directory / 'tsdb'}",
    ]
    async with Children(grace=5) as children:
        children.add(
            await spawn("prometheus", command, log=directory / "prometheus.log", env={}, cwd=directory)
        )
        found = Prometheus(f"http://{address}")
        await eventually(found.ready, within=30, what="Prometheus answers")
        yield found
