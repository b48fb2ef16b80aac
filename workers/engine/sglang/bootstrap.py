"""Whether a prefill engine's bootstrap server answers for all of its ranks.

SGLang starts the server in a thread and only logs that it could not bind; its
`/health` says yes before any rank has registered, so `/route` is asked.

A decode engine asks as well, before SGLang does: SGLang's scheduler asks an
address that it does not know fifteen times, up to five seconds each, and
computes nothing for anybody meanwhile.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from typing import Any, Final

from inferbus.schemas.errors import TransferFailed
from inferbus.schemas.fleet import Bootstrap
from inferbus.workers.engine.sglang.errors import LaunchFailed

log = logging.getLogger(__name__)

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
    until = time.monotonic() + READY_SECONDS
    while True:
        thread = getattr(manager.bootstrap_server, "thread", None)
        if thread is not None and not thread.is_alive():
            raise LaunchFailed(f"the bootstrap server could not listen for {where}; its reason is in the log")
        problem = await ask(bootstrap)
        if problem is None:
            return
        if time.monotonic() > until:
            raise LaunchFailed(f"the bootstrap server does not answer at {where}, as announced: {problem}")
        await asyncio.sleep(0.1)


async def ask(bootstrap: Bootstrap) -> str | None:
    """What keeps a bootstrap server from answering, if anything does."""
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
        return "it says nothing"
    except OSError as error:
        return str(error) or type(error).__name__
    return None if _OK.match(status) else f"it says {status[:40]!r}"


class Reached:
    """The bootstrap servers that have answered a decode engine."""

    def __init__(self) -> None:
        self._known: set[Bootstrap] = set()

    async def check(self, bootstrap: Bootstrap) -> None:
        """Asks a server that is not known to answer.

        Raises:
            TransferFailed: It does not; the message says where it should be.
        """
        if bootstrap in self._known:
            return
        if (problem := await ask(bootstrap)) is not None:
            where = f"{bootstrap.host}:{bootstrap.port}"
            raise TransferFailed(f"its bootstrap server does not answer at {where}: {problem}")
        self._known.add(bootstrap)

    def doubt(self, bootstrap: Bootstrap) -> None:
        """Has it asked again: a leg there did not get its cache."""
        self._known.discard(bootstrap)
