"""`inferbus up`: a whole system from one command, and nothing left of it after Ctrl-C."""

from __future__ import annotations

import asyncio
import re
import signal
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import openai
import pytest

from inferbus.workers.client import Client
from inferbus.workers.client.operator import Operator
from inferbus.workers.stack.local import free_ports
from inferbus.workers.stack.server import NatsServer

FREE = ("--port", "0", "--gateway-listen", "127.0.0.1:0")
SCRIPT = 'tokenizer = true\n[[rules]]\ntext = "Paris."\n'

pytestmark = pytest.mark.faults


@asynccontextmanager
async def up(*arguments: str) -> AsyncIterator[asyncio.subprocess.Process]:
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "inferbus.workers.cli", "up", *arguments, stderr=asyncio.subprocess.PIPE
    )
    try:
        yield child
    finally:
        with suppress(ProcessLookupError):
            child.send_signal(signal.SIGINT)
        await child.wait()


async def said(child: asyncio.subprocess.Process, pattern: str) -> re.Match[str]:
    """The first line of standard error that fits."""
    assert child.stderr is not None
    lines: list[str] = []
    async with asyncio.timeout(90):
        while line := (await child.stderr.readline()).decode():
            lines.append(line)
            if found := re.search(pattern, line):
                return found
    raise AssertionError(f"never said {pattern!r}: {''.join(lines)}")


@pytest.mark.parametrize("layout", [[], ["--aggregated"]])
async def test_it_serves_until_it_is_interrupted(tmp_path: Path, layout: list[str]) -> None:
    script = tmp_path / "script.toml"
    script.write_text(SCRIPT)
    async with up("--scripted", str(script), *FREE, "--served-model", "m", *layout) as child:
        http = (await said(child, r"OpenAI's API at (http://\S+)"))[1]
        url = (await said(child, r"ready: the model m at (nats://\S+);"))[1]
        async with Client.connect(url) as client:
            answer = await client.chat("m", [{"role": "user", "content": "Where?"}]).answer()
            roles = sorted(info.role for info in await client.workers())
        assert isinstance(answer, dict)
        assert answer["choices"][0]["message"]["content"] == "Paris."
        async with openai.AsyncOpenAI(base_url=http, api_key="none") as openais:
            completion = await openais.chat.completions.create(
                model="m", messages=[{"role": "user", "content": "Where?"}]
            )
        assert completion.choices[0].message.content == "Paris."
        assert roles == (["both"] if layout else ["decode", "prefill"])
        child.send_signal(signal.SIGINT)
        async with asyncio.timeout(60):
            assert await child.wait() == 0
    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))


async def test_settings_of_workers_are_passed_on(tmp_path: Path) -> None:
    script = tmp_path / "script.toml"
    script.write_text(SCRIPT)
    first = next(port for port in free_ports(20) if _is_free(port + 1))
    flags = ("--slots", "3", "--classes", "batch:2", "--metrics-port", str(first))
    async with up("--scripted", str(script), *FREE, "--served-model", "m", "--no-gateway", *flags) as child:
        url = (await said(child, r"ready: the model m at (nats://\S+);"))[1]
        async with Client.connect(url) as client:
            assert [info.load.slots for info in await client.workers()] == [3, 3]
            assert {queue.job_class for queue in await Operator(client.bus).queues()} == {"batch"}
        for port in (first, first + 1):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"GET /metrics HTTP/1.0\r\n\r\n")
            assert b"inferbus_" in await reader.read()
            writer.close()


def _is_free(port: int) -> bool:
    with socket.socket() as listener, suppress(OSError):
        listener.bind(("127.0.0.1", port))
        return True
    return False


async def test_a_port_in_use_is_one_line_and_the_code_1(tmp_path: Path) -> None:
    script = tmp_path / "script.toml"
    script.write_text(SCRIPT)
    async with (
        NatsServer(tmp_path / "nats") as taken,
        up("--scripted", str(script), *FREE, "--port", str(taken.port)) as child,
    ):
        await said(child, f"^inferbus: port {taken.port} on 127.0.0.1 is in use")
        assert await child.wait() == 1


async def test_an_address_of_the_gateway_in_use_is_told_before_anything_loads(tmp_path: Path) -> None:
    script = tmp_path / "script.toml"
    script.write_text(SCRIPT)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        listen = f"127.0.0.1:{taken.getsockname()[1]}"
        async with up("--scripted", str(script), *FREE, "--gateway-listen", listen) as child:
            await said(child, f"--gateway-listen: cannot listen on {listen}: Address already in use")
            assert await child.wait() == 1


async def test_a_script_that_cannot_be_used_ends_it_and_says_why(tmp_path: Path) -> None:
    script = tmp_path / "script.toml"
    script.write_text("nonsense = 1\n")
    async with up("--scripted", str(script), *FREE, "--directory", str(tmp_path / "d")) as child:
        await said(child, "^inferbus: .*nonsense")
        async with asyncio.timeout(60):
            assert await child.wait() == 1
