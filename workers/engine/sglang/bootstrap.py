"""Whether a prefill engine's bootstrap server answers for all of its ranks.

SGLang starts the server in a thread and only logs that it could not bind. Its
`/health` reports success before any rank has registered, so `/route` is asked.

A decode worker asks as well, before its engine does: SGLang's scheduler retries
an unknown address fifteen times, up to five seconds each, and computes nothing
meanwhile.
"""

from __future__ import annotations

import asyncio
import re
import time
from typing import Any, Final

from inferbus.schemas.errors import TransferFailed
from inferbus.schemas.fleet import Bootstrap
from inferbus.workers.engine.sglang.startup import LaunchFailed

READY_SECONDS: Final = 30.0
ASK_SECONDS: Final = 3.0
_ROUTE: Final = "/route?prefill_dp_rank=-1&prefill_cp_rank=-1&target_tp_rank=-1&target_pp_rank=-1"
_OK: Final = re.compile(rb"HTTP/1\.[01] 200\b")


async def wait_ready(manager: Any, bootstrap: Bootstrap) -> None:
    """Returns once decode engines can find this one at the address that it announces.

    Raises:
        LaunchFailed: The server does not run, or cannot be reached there.
    """
    where = f"{bootstrap.host}:{bootstrap.port}"
    deadline = time.monotonic() + READY_SECONDS
    while True:
        thread = getattr(manager.bootstrap_server, "thread", None)
        if thread is not None and not thread.is_alive():
            raise LaunchFailed(f"the bootstrap server could not listen for {where}; its reason is in the log")
        problem = await ask(bootstrap)
        if problem is None:
            return
        if time.monotonic() > deadline:
            raise LaunchFailed(f"the bootstrap server does not answer at {where}, as announced: {problem}")
        await asyncio.sleep(0.1)


async def ask(bootstrap: Bootstrap) -> str | None:
    """Why a bootstrap server does not answer; None if it does."""
    host = f"[{bootstrap.host}]" if ":" in bootstrap.host else bootstrap.host
    try:
        async with asyncio.timeout(ASK_SECONDS):
            reader, writer = await asyncio.open_connection(bootstrap.host, bootstrap.port)
            try:
                writer.write(f"GET {_ROUTE} HTTP/1.0\r\nHost: {host}:{bootstrap.port}\r\n\r\n".encode())
                status = await reader.readline()
            finally:
                writer.close()
    except TimeoutError:
        return "no response in time"
    except OSError as error:
        return str(error) or type(error).__name__
    return None if _OK.match(status) else f"the response was {status[:40]!r}"


class KnownServers:
    """The bootstrap servers that have answered a decode engine."""

    def __init__(self) -> None:
        self._known: set[Bootstrap] = set()

    async def check(self, bootstrap: Bootstrap) -> None:
        """Asks a server that has not answered yet.

        Raises:
            TransferFailed: It does not answer; the message has its address.
        """
        if bootstrap in self._known:
            return
        if (problem := await ask(bootstrap)) is not None:
            where = f"{bootstrap.host}:{bootstrap.port}"
            raise TransferFailed(f"its bootstrap server does not answer at {where}: {problem}")
        self._known.add(bootstrap)

    def forget(self, bootstrap: Bootstrap) -> None:
        """Has `check` ask it again; for a server where a leg got no KV cache."""
        self._known.discard(bootstrap)
