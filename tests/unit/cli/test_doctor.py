"""How findings are shown."""

from __future__ import annotations

import sys

import pytest

from inferbus.workers.cli.doctor import show
from inferbus.workers.doctor.findings import fail, ok

FINDINGS = [ok("nats", "nats-server 2.15.1"), fail("streams", "INFER_JOBS: missing\x1b[2J", "adopt them")]


def test_a_file_gets_a_line_for_each_finding_and_one_for_what_to_do(
    capsys: pytest.CaptureFixture[str],
) -> None:
    show(FINDINGS)
    assert capsys.readouterr().out.splitlines() == [
        "ok    nats: nats-server 2.15.1",
        "fail  streams: INFER_JOBS: missing\\x1b[2J",
        "      adopt them",
    ]


def test_a_terminal_gets_a_table(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "dumb")
    monkeypatch.setenv("COLUMNS", "100")
    show(FINDINGS)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["what", "ok", "fail"]
    assert "INFER_JOBS: missing\\x1b[2J" in lines[2]
    assert lines[2].rstrip().endswith("adopt them")
