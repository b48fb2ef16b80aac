"""NVIDIA's Multi-Process Service for two engines that share one GPU.

Without it the processes take turns on the GPU; with it, prefill and decode overlap. The daemon is private,
with folders of its own, so that other programs neither use it nor keep it from ending.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from inferbus.workers.stack.errors import MpsUnavailable
from inferbus.workers.stack.processes import Child, spawn

PROGRAM: Final = "nvidia-cuda-mps-control"
READY_SECONDS: Final = 20.0
ANSWER_SECONDS: Final = 10.0
END_SECONDS: Final = 10.0
LOOK_EVERY: Final = 0.1


class Mps:
    """The control daemon, from entering to leaving; programs that are to share the GPU have `env` set.

    Whoever uses it ends first: leaving takes the GPU away from what still runs. A program that is killed
    in the middle of its work on the GPU can take the others with it, which is how MPS is.
    """

    def __init__(self) -> None:
        # Short, since sockets are made in it whose paths may have some hundred characters.
        self._directory = Path(tempfile.mkdtemp(prefix="inferbus-mps-"))
        self._child: Child | None = None

    @property
    def env(self) -> dict[str, str]:
        """What makes a CUDA program a client of this daemon."""
        return {
            "CUDA_MPS_PIPE_DIRECTORY": str(self._directory / "pipe"),
            "CUDA_MPS_LOG_DIRECTORY": str(self._directory / "log"),
        }

    async def __aenter__(self) -> Self:
        try:
            if shutil.which(PROGRAM) is None:
                raise MpsUnavailable(f"{PROGRAM} is not on PATH; it comes with the NVIDIA driver")
            for folder in ("pipe", "log"):
                (self._directory / folder).mkdir()
            # In the foreground, so that the daemon dies with us, however we do.
            log = self._directory / "control.log"
            self._child = await spawn("mps", [PROGRAM, "-f"], log=log, env=self.env)
            await self._child.until(self._answers, timeout=READY_SECONDS, poll=LOOK_EVERY)
        except BaseException:
            await self._end()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._end()

    async def _end(self) -> None:
        if self._child is not None:
            if self._child.returncode is None and await self._ask("quit") == 0:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._child.wait(), END_SECONDS)
            await self._child.stop()
        shutil.rmtree(self._directory, ignore_errors=True)

    async def _answers(self) -> bool:
        return await self._ask("get_server_list") == 0

    async def _ask(self, command: str) -> int | None:
        """Gives the daemon a command; the exit status of doing so, None where no answer came."""
        process = await asyncio.create_subprocess_exec(
            PROGRAM,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
            env={**os.environ, **self.env},
        )
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                await process.communicate(f"{command}\n".encode())
        except TimeoutError:
            process.kill()
            await process.wait()
            return None
        return process.returncode
