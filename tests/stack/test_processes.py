"""Supervision of child processes, tried on real ones."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

import pytest

from inferbus.workers.stack.errors import ProcessExited, ProcessNotReady
from inferbus.workers.stack.processes import Child, Children, session_members, spawn

# Says "up" once it ignores SIGTERM; has a child of its own that ignores it as well.
STUBBORN = """
import os, signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
os.fork()
print("up", flush=True)
time.sleep(600)
"""

# Ends in good order on SIGTERM.
POLITE = """
import signal, sys, time
def leave(*_):
    print("bye", flush=True)
    sys.exit(0)
signal.signal(signal.SIGTERM, leave)
print("up", flush=True)
time.sleep(600)
"""


async def python(tmp_path: Path, code: str, name: str = "child") -> Child:
    return await spawn(name, [sys.executable, "-c", code], log=tmp_path / f"{name}.log")


async def said(child: Child, word: str, times: int = 1) -> None:
    async def probe() -> bool:
        return child.tail().count(word) >= times

    await child.until(probe, timeout=20)


async def test_output_goes_to_the_log_file(tmp_path: Path) -> None:
    child = await python(tmp_path, "import sys; print('out'); print('err', file=sys.stderr)")
    assert await child.wait() == 0
    assert sorted(child.tail()) == ["err", "out"]


async def test_an_early_exit_is_told_with_the_last_lines(tmp_path: Path) -> None:
    child = await python(tmp_path, "raise SystemExit('model folder is empty')")

    async def never() -> bool:
        return False

    with pytest.raises(ProcessExited, match="exit status 1") as caught:
        await child.until(never, timeout=20)
    assert "model folder is empty" in str(caught.value)


async def test_a_program_that_does_not_exist_is_named(tmp_path: Path) -> None:
    child = await spawn("ghost", ["/no/such/program"], log=tmp_path / "log")
    assert await child.wait() == 1
    assert child.tail() == ["cannot run /no/such/program: No such file or directory"]


async def test_a_child_that_never_gets_ready_is_reported_and_left_running(tmp_path: Path) -> None:
    child = await python(tmp_path, POLITE)
    await said(child, "up")

    async def never() -> bool:
        return False

    with pytest.raises(ProcessNotReady, match="not ready"):
        await child.until(never, timeout=0.1)
    assert child.returncode is None
    await child.stop()


async def test_stop_lets_the_child_end_in_good_order(tmp_path: Path) -> None:
    child = await python(tmp_path, POLITE)
    await said(child, "up")
    assert await child.stop(grace=20) == 0
    assert child.tail() == ["up", "bye"]


async def test_stop_insists_after_the_grace_period_and_takes_grandchildren_along(tmp_path: Path) -> None:
    child = await python(tmp_path, STUBBORN)
    await said(child, "up", times=2)
    assert len(session_members(child.pid)) == 2
    assert await child.stop(grace=0.1) == -signal.SIGKILL
    assert session_members(child.pid) == []


async def test_grandchildren_of_a_child_that_crashed_are_ended_too(tmp_path: Path) -> None:
    child = await python(tmp_path, STUBBORN)
    await said(child, "up", times=2)
    os.kill(child.pid, signal.SIGKILL)
    await child.wait()
    assert len(session_members(child.pid)) == 1
    await child.stop()
    assert session_members(child.pid) == []


async def test_children_are_stopped_last_started_first(tmp_path: Path) -> None:
    ended: list[str] = []
    async with Children(grace=20) as children:
        for name in ("first", "second"):
            children.add(await python(tmp_path, POLITE, name))
        waits = [asyncio.create_task(_note(child, ended)) for child in children]
        for child in children:
            await said(child, "up")
    await asyncio.gather(*waits)
    assert ended == ["second", "first"]


async def _note(child: Child, ended: list[str]) -> None:
    await child.wait()
    ended.append(child.name)


async def test_the_first_child_to_end_is_named(tmp_path: Path) -> None:
    async with Children(grace=20) as children:
        children.add(await python(tmp_path, POLITE, "stays"))
        children.add(await python(tmp_path, "pass", "goes"))
        assert (await children.first_exit()).name == "goes"


@pytest.mark.faults
async def test_children_die_with_a_parent_that_is_killed(tmp_path: Path) -> None:
    code = f"""
import asyncio, pathlib, sys
from inferbus.workers.stack.processes import spawn

async def main():
    log = pathlib.Path({str(tmp_path / "grandchild.log")!r})
    child = await spawn("c", [sys.executable, "-c", "import time; time.sleep(600)"], log=log)
    print(child.pid, flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""
    parent = await spawn("parent", [sys.executable, "-c", code], log=tmp_path / "parent.log")

    async def told() -> bool:
        return bool(parent.tail())

    await parent.until(told, timeout=20)
    grandchild = int(parent.tail()[0])
    assert session_members(grandchild) == [grandchild]
    os.kill(parent.pid, signal.SIGKILL)
    await parent.wait()
    watcher = await python(tmp_path, POLITE, "watcher")

    async def gone() -> bool:
        return not session_members(grandchild)

    await watcher.until(gone, timeout=20)
    await watcher.stop()
