"""A worker's probes, asked as Kubernetes asks them."""

from __future__ import annotations

import asyncio
import urllib.error
import urllib.request


async def probe(port: int, path: str) -> tuple[int, str]:
    """The status and the text of an endpoint of this machine."""

    def get() -> tuple[int, str]:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=10) as answer:
                return answer.status, answer.read().decode().strip()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode().strip()

    return await asyncio.to_thread(get)
