"""NVIDIA's Multi-Process Service is started with folders of its own, and ended with what used it.

A program of the same name stands in for the daemon, so that this runs where there is no GPU; on a real one it
was tried by `benchmarks.gpu`.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from inferbus.workers.cli.main import main
from inferbus.workers.stack import flags
from inferbus.workers.stack.errors import MpsUnavailable, ProcessExited
from inferbus.workers.stack.mps import PROGRAM, Mps

DAEMON = """#!/bin/bash
# As the real one: -f is the daemon, without it a command for the daemon comes on standard input.
pipe=$CUDA_MPS_PIPE_DIRECTORY
if [ "$1" = -f ]; then
    echo "$$" >"$pipe/pid"
    while [ ! -e "$pipe/quit" ]; do sleep 0.02; done
    echo gone >"$TOLD"
    exit 0
fi
[ -e "$pipe/pid" ] || exit 1
read -r command
[ "$command" = quit ] && touch "$pipe/quit"
exit 0
"""


@pytest.fixture
def told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the daemon says that it ended in good order."""
    program = tmp_path / PROGRAM
    program.write_text(DAEMON)
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("TOLD", str(tmp_path / "told"))
    return tmp_path / "told"


async def test_it_answers_when_entered_and_is_gone_when_left(told: Path) -> None:
    async with Mps() as mps:
        pipe = Path(mps.env["CUDA_MPS_PIPE_DIRECTORY"])
        pid = int((pipe / "pid").read_text())
        os.kill(pid, 0)
    assert told.exists()  # noqa: ASYNC240
    assert not pipe.parent.exists()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


async def test_two_of_them_do_not_meet(told: Path) -> None:
    async with Mps() as one, Mps() as other:
        assert not set(one.env.values()) & set(other.env.values())


async def test_without_the_program_it_is_one_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(MpsUnavailable, match=PROGRAM):
        async with Mps():
            pass


async def test_a_daemon_that_ends_at_once_says_why(told: Path, tmp_path: Path) -> None:
    (tmp_path / PROGRAM).write_text("#!/bin/bash\necho 'no device here'\nexit 1\n")
    with pytest.raises(ProcessExited, match="no device here"):
        async with Mps():
            pass


@pytest.mark.parametrize(
    ("gpus", "shared", "decode"),
    [
        (1, False, [flags.RESERVED, flags.RESERVED_TOKENS]),
        (2, True, [flags.RESERVED, flags.RESERVED_TOKENS]),
        (2, False, ["--base-gpu-id", "1"]),
        (0, True, None),
    ],
)
def test_where_the_two_engines_go(
    monkeypatch: pytest.MonkeyPatch, gpus: int, shared: bool, decode: list[str] | None
) -> None:
    monkeypatch.setattr(flags, "_gpus", lambda: gpus)
    monkeypatch.delenv("INFERBUS_CPU", raising=False)
    assert flags.placement(shared=shared).role_flags.get("decode") == decode


def test_one_worker_alone_has_nobody_to_share_with(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["up", "--mps", "--aggregated"]) == 2
    assert "two workers that share a GPU" in capsys.readouterr().err


def test_a_machine_without_the_program_is_one_line_and_the_code_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "script.toml").write_text("tokenizer = true\n")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert main(["up", "--mps", "--scripted", str(tmp_path / "script.toml"), "--port", "0"]) == 1
    assert f"inferbus: {PROGRAM} is not on PATH" in capsys.readouterr().err
