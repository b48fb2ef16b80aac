"""Waits until a prefill engine's bootstrap server answers for all of its ranks.

SGLang starts the server in a thread and only logs that it could not bind; its
`/health` says yes before any rank has registered, so `/route` is asked.
"""

from __future__ import annotations

import asyncio
import http.client
import logging
import time
from typing import Any, Final

from schemas.fleet import Bootstrap
from workers.engine.sglang.errors import LaunchFailed

log = logging.getLogger(__name__)

READY_SECONDS: Final = 30.0
_ROUTE: Final = "/route?prefill_dp_rank=-1&prefill_cp_rank=-1&target_tp_rank=-1&target_pp_rank=-1"


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
        problem = await asyncio.to_thread(_ask, bootstrap)
        if problem is None:
            return
        if time.monotonic() > until:
            raise LaunchFailed(f"the bootstrap server does not answer at {where}, as announced: {problem}")
        await asyncio.sleep(0.1)


def _ask(bootstrap: Bootstrap) -> str | None:
    """What is wrong, if anything."""
    connection = http.client.HTTPConnection(bootstrap.host, bootstrap.port, timeout=5)
    try:
        connection.request("GET", _ROUTE)
        response = connection.getresponse()
    except (OSError, http.client.HTTPException) as error:
        return str(error) or type(error).__name__
    else:
        return None if response.status == http.client.OK else f"status {response.status}"
    finally:
        connection.close()
