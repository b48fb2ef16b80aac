"""The whole stack as processes, with scripted engines: real NATS, real workers, no SGLang."""

from __future__ import annotations

import os
import shutil
import signal
import socket
from pathlib import Path

import pytest

from inferbus.workers.client import Client
from inferbus.workers.stack.errors import ProcessExited, StackError
from inferbus.workers.stack.local import LocalStack, free_ports
from inferbus.workers.stack.processes import session_members

SCRIPT = """
tokenizer = true

[[rules]]
text = "Paris."
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "script.toml"
    path.write_text(SCRIPT)
    return path


async def test_prefill_and_decode_workers_answer_through_nats(script: Path) -> None:
    said: list[str] = []
    async with LocalStack("", model="toy", scripted=script, report=said.append) as stack:
        pids = [child.pid for child in stack.workers.values()]
        async with Client.connect(stack.url) as client:
            stream = client.chat("toy", [{"role": "user", "content": "Capital of France?"}])
            answer = await stream.answer()
    assert isinstance(answer, dict)
    assert answer["choices"][0]["message"]["content"] == "Paris."
    prefill, decode = stack.workers
    assert (stream.prefill_worker, stream.worker) == (prefill, decode)
    assert [line.split(" after ")[0] for line in said[1:]] in (
        [f"{prefill} is ready", f"{decode} is ready"],
        [f"{decode} is ready", f"{prefill} is ready"],
    )
    assert [session_members(pid) for pid in pids] == [[], []]
    assert not stack.directory.exists()


async def test_one_worker_can_do_both(script: Path) -> None:
    async with (
        LocalStack("", model="toy", roles=["both"], scripted=script) as stack,
        Client.connect(stack.url) as client,
    ):
        chunk = [chunk async for chunk in client.tokens("toy", [1, 2, 3])][-1]
        assert chunk.finish_reason == "stop"


async def test_a_worker_that_cannot_start_ends_the_stack_and_is_quoted(tmp_path: Path) -> None:
    broken = tmp_path / "broken.toml"
    broken.write_text("no = such setting")
    stack = LocalStack("", model="toy", scripted=broken)
    with pytest.raises(StackError, match=r"(prefill|decode)-\w+ (ended with exit status|could not start)"):
        async with stack:
            pytest.fail("it started")
    assert not stack.server.running
    # Its logs stay: they say why.
    assert list(stack.directory.glob("*.log"))
    shutil.rmtree(stack.directory)


@pytest.mark.faults
async def test_the_loss_of_a_worker_is_noticed(script: Path) -> None:
    async with LocalStack("", model="toy", scripted=script) as stack:
        name, child = next(iter(stack.workers.items()))
        os.kill(child.pid, signal.SIGKILL)
        failure = await stack.failed()
        assert isinstance(failure, ProcessExited)
        assert (failure.name, failure.returncode) == (name, -signal.SIGKILL)


@pytest.mark.faults
async def test_the_loss_of_the_server_is_noticed(script: Path) -> None:
    async with LocalStack("", model="toy", roles=["both"], scripted=script) as stack:
        os.kill(stack.server.child.pid, signal.SIGKILL)
        assert "nats-server" in str(await stack.failed())


async def test_settings_for_other_servers_do_not_reach_the_workers(
    script: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("INFERBUS_NATS_CREDS", "/no/such/file.creds")
    async with LocalStack("", model="toy", roles=["both"], scripted=script) as stack:
        assert len(stack.workers) == 1


def test_ports_for_engines_that_start_together_differ_and_are_free() -> None:
    found = free_ports(200)
    assert len(set(found)) == 200
    for port in found[:20]:
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", port))
