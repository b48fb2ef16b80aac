"""A real Prometheus: the one on PATH, else Debian's package, unpacked into the cache."""

from __future__ import annotations

import asyncio
import json
import shutil
import socket
import subprocess
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
    unpacked = CACHE / "usr" / "bin" / name
    if not unpacked.exists() and shutil.which("apt-get") and shutil.which("dpkg"):
        CACHE.mkdir(parents=True, exist_ok=True)
        done = subprocess.run(["apt-get", "download", "prometheus"], cwd=CACHE, capture_output=True)
        for package in CACHE.glob("prometheus_*.deb") if done.returncode == 0 else ():
            subprocess.run(["dpkg", "-x", package, CACHE], check=True)
            package.unlink()
    return unpacked if unpacked.exists() else None


class Prometheus:
    """One that scrapes.

    Args:
        url: Where it answers.
    """

    def __init__(self, url: str) -> None:
        self._url = url

    async def query(self, expression: str) -> list[float]:
        """The values of an expression now, one for each series."""
        answer = await self._get("query?" + urllib.parse.urlencode({"query": expression}))
        return [float(each["value"][1]) for each in answer["data"]["result"]]

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
    """Scrapes these ports of this machine five times a second."""
    targets = ", ".join(f'"127.0.0.1:{port}"' for port in ports)
    file = directory / "prometheus.yml"
    file.write_text(
        "global: {scrape_interval: 200ms, scrape_timeout: 200ms}\n"
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
