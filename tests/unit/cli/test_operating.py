"""The operator's commands without a server: usage, lengths of time, and what tables show."""

from __future__ import annotations

import datetime as dt
import sys
from pathlib import Path
from typing import Any

import pytest

from inferbus.schemas.subjects import JobAddress, Subjects
from inferbus.workers.bus.durations import nanoseconds
from inferbus.workers.bus.jetstream.layout import job_consumer
from inferbus.workers.cli import main
from inferbus.workers.cli.queues import state
from inferbus.workers.cli.tables import moment, print_table, printable, size, span
from inferbus.workers.client.records import Queue, queue_address

NOBODY = ["--nats-url", "nats://127.0.0.1:1"]


@pytest.mark.parametrize(
    "arguments",
    [
        ["dead"],
        ["dead", "show"],
        ["dead", "show", "first"],
        ["dead", "show", "0"],
        ["dead", "replay"],
        ["dead", "replay", "1", "--all"],
        ["dead", "replay", "1", "--model", "m"],
        ["dead", "purge"],
        ["dead", "purge", "--all"],
        ["dead", "purge", "--all", "--model", "m"],
        ["jobs"],
        ["jobs", "ls", "--class", "urgent"],
        ["jobs", "ls", "--limit", "-1"],
        ["jobs", "show", "acme", "j", "k"],
        ["jobs", "cancel", "acme"],
        ["pause"],
        ["pause", "m", "--for", "soon"],
        ["pause", "m", "--for", "0"],
        ["pause", "m", "--for", "-5m"],
        ["pause", "m", "--for", "999999999d"],
        ["resume"],
        ["streams", "--streams-replicas", "9"],
    ],
    ids=" ".join,
)
def test_wrong_usage_is_told_before_nats_is_asked(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    told = capsys.readouterr()
    assert told.err
    assert "Traceback" not in told.err
    assert told.out == ""


@pytest.mark.parametrize(
    "arguments",
    [
        ["dead", "ls"],
        ["dead", "show", "1"],
        ["dead", "replay", "1", "2"],
        ["dead", "replay", "--all", "--model", "m"],
        ["dead", "purge", "1"],
        ["dead", "purge", "--all", "--yes"],
        ["jobs", "ls"],
        ["jobs", "show", "acme", "j"],
        ["jobs", "cancel", "acme", "j", "k"],
        ["pause", "m", "--for", "1.5h", "--class", "batch"],
        ["resume", "m"],
        ["streams"],
        ["streams", "--adopt"],
    ],
    ids=" ".join,
)
def test_no_server_is_one_line_and_the_code_3(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*arguments, *NOBODY]) == 3
    told = capsys.readouterr()
    assert told.err.startswith("inferbus: bus_unavailable: no NATS server at ")
    assert told.err.count("\n") == 1
    assert told.out == ""


@pytest.mark.parametrize("command", [["dead", "ls"], ["dead", "replay"], ["jobs", "ls"], ["pause"]])
def test_an_operator_has_the_options_of_nats_alone(
    command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*command, "--help"]) == 0
    shown = capsys.readouterr().out
    assert "--nats-url" in shown
    assert "--slots" not in shown


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [
        (0, "0s"),
        (-3, "0s"),
        (0.4, "0s"),
        (59, "59s"),
        (60, "1m"),
        (125, "2m5s"),
        (7265, "2h1m"),
        (90000, "1d1h"),
    ],
)
def test_a_span_is_its_two_largest_units(seconds: float, shown: str) -> None:
    assert span(seconds) == shown


@pytest.mark.parametrize(
    ("count", "shown"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (256 << 20, "256.0 MiB")]
)
def test_sizes_are_in_binary_units(count: int, shown: str) -> None:
    assert size(count) == shown


def test_a_moment_is_in_utc() -> None:
    zone = dt.timezone(dt.timedelta(hours=2))
    assert moment(dt.datetime(2030, 1, 2, 3, 4, 5, 6, zone)) == "2030-01-02T01:04:05Z"


def test_a_table_that_is_too_wide_for_the_terminal_becomes_blocks(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    print_table(("model", "worker"), [("llama", "w1"), ("x" * 78, "w2"), (None, "w3")])
    assert capsys.readouterr().out == (
        f"model   llama\nworker  w1\n\nmodel   {'x' * 78}\nworker  w2\n\nworker  w3\n"
    )
    print_table(("model", "worker"), [("llama", "w1")])
    assert capsys.readouterr().out == "model  worker\nllama  w1\n"


def test_a_name_cannot_do_anything_to_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    print_table(("job", "none"), [("a\x1b[2J\r\nb [bold]模型[/bold]", None)])
    out = capsys.readouterr().out
    assert out.splitlines()[1].rstrip() == "a\\x1b[2J\\x0d\\x0ab [bold]模型[/bold]"
    assert printable("a b") == "a b"


def queue(until: dt.datetime | None) -> Queue:
    info: dict[str, Any] = {
        "name": "m-batch",
        "config": {"filter_subject": "infer.jobs.m.batch.*.*", "ack_wait": nanoseconds(30)},
        "num_pending": 1,
        "num_ack_pending": 0,
        "num_redelivered": 0,
        "num_waiting": 0,
        "delivered": {"stream_seq": 0},
    }
    if until is not None:
        info["config"]["pause_until"] = until.isoformat()
        info["paused"] = True
    found = Queue.of(info, Subjects())
    assert found is not None
    return found


def test_a_pause_says_when_it_ends() -> None:
    now = dt.datetime.now(dt.UTC)
    assert state(queue(None)) == "open"
    soon = now + dt.timedelta(minutes=10)
    assert state(queue(soon)) == f"paused until {moment(soon)}"
    assert state(queue(now + dt.timedelta(days=3600))) == "paused until it is resumed"


@pytest.mark.parametrize("model", ["m", "meta-llama/Llama-3.1-8B", "模型", "x" * 128])
def test_a_queue_is_known_by_what_it_gives_out(model: str) -> None:
    subjects = Subjects("acme.llm")
    config = job_consumer(subjects, model, "batch", ack_wait=30)
    found = queue_address(config["filter_subject"], subjects)
    assert isinstance(found, JobAddress)
    assert (found.model, found.job_class) == (model, "batch")
    for foreign in ("", "acme.llm.jobs.>", "acme.llm.jobs.m.batch.o.*", "infer.jobs.m.batch.*.*"):
        assert queue_address(foreign, subjects) is None


def test_operating_names_every_command_of_an_operator() -> None:
    page = Path("docs/operating.md").read_text()
    commands = ("dead ls", "dead show", "dead replay", "dead purge", "jobs ls", "jobs show", "jobs cancel")
    for command in (*commands, "pause", "resume", "streams", "workers", "health"):
        assert f"inferbus {command}" in page
