"""The Python programs in the documentation run as they are, against a real server and scripted workers."""

from __future__ import annotations

import asyncio
import re
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
import pytest_asyncio

from inferbus.workers.stack.server import NatsServer
from tests.support.fleet import fleet

ROOT = Path(__file__).parents[2]
URL = "nats://127.0.0.1:4222"
MODELS = ("qwen", "llama")
SCRIPT = 'tokenizer = true\n[[rules]]\ntext = "Rayleigh scattering."\n'
PAGES = ("README.md", "docs/client.md", "docs/batch.md")
SNIPPETS = [
    pytest.param(found[1], id=f"{page}:{number}")
    for page in PAGES
    for number, found in enumerate(
        re.finditer(r"^```python\n(.*?)^```$", (ROOT / page).read_text(), re.DOTALL | re.MULTILINE), 1
    )
]

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[NatsServer]:
    directory = tmp_path_factory.mktemp("snippets")
    async with AsyncExitStack() as stack:
        found = await stack.enter_async_context(NatsServer(directory / "nats", sync_interval=None))
        for model in MODELS:
            (directory / model).mkdir()
            workers = await stack.enter_async_context(fleet(found, directory / model, model=model))
            await workers.start("both", SCRIPT, served_model=model)
        yield found


@pytest.mark.parametrize("snippet", SNIPPETS)
async def test_a_program_runs_as_pasted_into_a_file(server: NatsServer, snippet: str, tmp_path: Path) -> None:
    assert URL in snippet
    program = tmp_path / "program.py"
    program.write_text(snippet.replace(URL, server.url))
    child = await asyncio.create_subprocess_exec(
        *(sys.executable, "-W", "error", str(program)),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    async with asyncio.timeout(60):
        out, err = await child.communicate()
    assert (child.returncode, err.decode()) == (0, "")
    assert "Rayleigh scattering." in out.decode()
