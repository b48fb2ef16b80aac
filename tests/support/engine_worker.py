"""A real worker whose engine runs in another process, one that tests share.

    python -m tests.support.engine_worker ROLE FOLDER

The folder is the `RemoteEngine`'s. Settings come from the environment.
"""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path
from typing import Any

from inferbus.schemas.fleet import Role
from inferbus.workers.config import resolve
from inferbus.workers.roles import run, worker
from tests.support.remote_engine import RemoteEngine


def main(role: Role, folder: Path) -> int:
    """Serves until it is told to stop; the engine goes on."""

    class Shared(RemoteEngine):
        async def close(self) -> None:
            """Others use it, too."""

    async def launch(*_: Any) -> Shared:
        engine = Shared(role, folder, ())
        await asyncio.to_thread(engine.wait_ready)
        return engine

    setattr(worker, "launch", launch)  # noqa: B010
    return run(role, resolve({}, os.environ))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], Path(sys.argv[2])))  # type: ignore[arg-type]
