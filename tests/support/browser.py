"""A real browser without a window: Debian's chromium, driven over its DevTools protocol through two pipes."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from tests.support.eventually import eventually

PROGRAM = shutil.which("chromium")

# It reads commands from descriptor 3 and answers on 4; both end with a zero byte.
_SHELL = 'exec "$0" "$@" 3<&{read} 4>&{write}'
_FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--no-proxy-server",
    "--remote-debugging-pipe",
)


class Page:
    """One page.

    Attributes:
        problems: What its console has complained of.
    """

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.problems: list[str] = []
        self._reader = reader
        self._writer = writer
        self._session = ""
        self._count = 0

    async def open(self, url: str) -> None:
        """Opens the page."""
        target = await self._call("Target.createTarget", url="about:blank")
        attached = await self._call("Target.attachToTarget", targetId=target["targetId"], flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Log", "Runtime"):
            await self._call(f"{domain}.enable")
        await self._call("Page.navigate", url=url)
        await self.until("document.readyState === 'complete'")

    async def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression."""
        answer = await self._call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    async def until(self, expression: str, *, within: float = 30.0) -> Any:
        """The first true value of an expression."""
        return await eventually(lambda: self.evaluate(expression), within=within, what=expression)

    async def _call(self, method: str, **params: Any) -> dict[str, Any]:
        self._count += 1
        message = {"id": self._count, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        self._writer.write(json.dumps(message).encode() + b"\0")
        await self._writer.drain()
        async with asyncio.timeout(30):
            while True:
                answer = json.loads((await self._reader.readuntil(b"\0"))[:-1])
                if answer.get("id") == self._count:
                    assert "error" not in answer, answer
                    result: dict[str, Any] = answer["result"]
                    return result
                self._note(answer)

    def _note(self, event: dict[str, Any]) -> None:
        match event.get("method"):
            case "Log.entryAdded" if event["params"]["entry"]["level"] in ("error", "warning"):
                self.problems.append(event["params"]["entry"]["text"])
            case "Runtime.exceptionThrown":
                self.problems.append(str(event["params"]["exceptionDetails"]))


@asynccontextmanager
async def browser(url: str, profile: Path) -> AsyncIterator[Page]:
    """A browser that shows a page.

    Args:
        url: Of the page.
        profile: An empty folder for it.
    """
    assert PROGRAM is not None
    commands, to_browser = os.pipe()
    from_browser, answers = os.pipe()
    shell = _SHELL.format(read=commands, write=answers)
    command = ["bash", "-c", shell, PROGRAM, *_FLAGS, f"--user-data-dir={profile}"]
    process = await asyncio.create_subprocess_exec(
        *command,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
        pass_fds=(commands, answers),
        start_new_session=True,
    )
    os.close(commands)
    os.close(answers)
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(limit=16 * 1024 * 1024)
    incoming, _ = await loop.connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(from_browser, "rb")
    )
    outgoing, protocol = await loop.connect_write_pipe(
        asyncio.streams.FlowControlMixin, os.fdopen(to_browser, "wb")
    )
    page = Page(reader, asyncio.StreamWriter(outgoing, protocol, None, loop))
    try:
        await page.open(url)
        yield page
    finally:
        # Without its pipes it ends by itself, and with it all that it started.
        outgoing.close()
        incoming.close()
        async with asyncio.timeout(30):
            await process.wait()
