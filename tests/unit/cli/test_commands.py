"""The command line without a server: its options, its usage errors, its exit codes."""

from __future__ import annotations

import importlib.util
import io
import json
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
import pytest

from inferbus.schemas.errors import (
    BusUnavailable,
    Cancelled,
    DeadlineExceeded,
    InferbusError,
    InvalidRequest,
    NoWorker,
    Overloaded,
    PayloadTooLarge,
)
from inferbus.workers import roles
from inferbus.workers.bus.errors import NotPermitted
from inferbus.workers.cli import main
from inferbus.workers.cli.ask import parse_params
from inferbus.workers.cli.main import inferbus
from inferbus.workers.cli.running import (
    EXIT_INTERRUPTED,
    EXIT_NATS,
    EXIT_NO_WORKER,
    EXIT_TIMED_OUT,
    exit_code,
    print_error,
    run_coroutine,
)
from inferbus.workers.cli.tables import readable
from inferbus.workers.cli.text import print_json
from inferbus.workers.client import TimedOut
from inferbus.workers.config import Settings, options

NOBODY = ["--nats-url", "nats://127.0.0.1:1"]
COMMANDS = inferbus.list_commands(click.Context(inferbus))


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    for option in options():
        monkeypatch.delenv(option.env, raising=False)


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """What `inferbus worker` starts, instead of starting it."""
    calls: list[tuple[Any, ...]] = []

    def run(role: str, settings: Settings, flags: Sequence[str], *, scripted: Path | None) -> int:
        calls.append((role, settings, list(flags), scripted))
        return 7

    monkeypatch.setattr(roles, "run", run)
    return calls


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, "--help"]) == 0
    assert "Usage: inferbus" in capsys.readouterr().out


def test_every_setting_is_an_option_of_a_worker(capsys: pytest.CaptureFixture[str]) -> None:
    main(["worker", "--help"])
    shown = " ".join(capsys.readouterr().out.split())
    for option in options("bus", "worker", "streams"):
        assert f"{option.flag} " in shown


def test_every_setting_is_an_option_of_a_gateway(capsys: pytest.CaptureFixture[str]) -> None:
    main(["gateway", "--help"])
    shown = " ".join(capsys.readouterr().out.split())
    for option in options("bus", "gateway"):
        assert f"{option.flag} " in shown
        assert option.env in shown


@pytest.mark.parametrize("command", ["chat", "submit", "workers", "health"])
def test_a_client_has_the_options_of_nats_alone(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    main([command, "--help"])
    shown = capsys.readouterr().out
    assert "--nats-url" in shown
    assert "--slots" not in shown


def test_a_secret_has_no_default_to_show(capsys: pytest.CaptureFixture[str]) -> None:
    main(["chat", "--help"])
    assert "[env INFERBUS_NATS_PASSWORD]" in " ".join(capsys.readouterr().out.split())


def test_flags_of_sglang_pass_through_a_worker_unchanged(started: list[tuple[Any, ...]]) -> None:
    flags = "--model-path /m --tp 2 --slots 3 --mem-fraction-static=0.8 --enable-metrics --dtype float32"
    assert main(["worker", "decode", *flags.split()]) == 7
    [(role, settings, passed, scripted)] = started
    assert (role, scripted) == ("decode", None)
    assert settings.worker.slots == 3
    assert passed == flags.replace(" --slots 3", "").split()


@pytest.mark.parametrize(
    "flags",
    [
        ["--served-model-name", "x"],
        ["--max-running-requests", "-1"],
        ["--json-model-override-args", '{"a": 1}'],
        ["--stop", "a b", "--x", ""],
        ["-tp", "2"],
    ],
)
def test_no_flag_of_sglang_is_taken_for_another(started: list[tuple[Any, ...]], flags: list[str]) -> None:
    assert main(["worker", "both", *flags]) == 7
    assert started[0][2] == flags


def test_after_two_dashes_everything_is_sglangs(started: list[tuple[Any, ...]]) -> None:
    assert main(["worker", "both", "--", "--slots", "3", "--help"]) == 7
    assert started[0][2] == ["--slots", "3", "--help"]


def test_a_script_is_replayed_instead_of_sglang(started: list[tuple[Any, ...]], tmp_path: Path) -> None:
    script = tmp_path / "s.toml"
    script.write_text("")
    assert main(["worker", "prefill", "--scripted", str(script), "--served-model", "m"]) == 7
    [(role, settings, flags, scripted)] = started
    assert (role, settings.worker.model, flags, scripted) == ("prefill", "m", [], script)


def test_a_scripted_worker_has_no_engine_to_give_flags_to(
    started: list[tuple[Any, ...]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "s.toml"
    script.write_text("")
    assert main(["worker", "both", "--scripted", str(script), "--tp", "2"]) == 2
    assert "flags: --tp\n" in capsys.readouterr().err
    assert started == []


@pytest.mark.parametrize("command", [["worker", "both"], ["up"]])
def test_a_worker_on_another_platform_is_one_line(
    command: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    assert main(command) == 1
    assert capsys.readouterr().err == (
        "inferbus: workers run on Linux only; the client and the other commands run here too\n"
    )


@pytest.mark.parametrize("command", [["worker", "both"], ["up"]])
def test_sglang_on_another_python_is_one_line(
    command: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "version_info", (3, 14, 0, "final", 0))
    assert main(command) == 1
    assert capsys.readouterr().err.startswith("inferbus: SGLang needs Python 3.11 or 3.12 and this is 3.14;")


@pytest.mark.parametrize(
    ("command", "module", "extra"),
    [
        (["worker", "both"], "sglang", "gpu"),
        (["worker", "both"], "uvloop", "gpu"),
        (["worker", "both", "--scripted", __file__], "uvloop", "worker"),
        (["up"], "nixl", "gpu"),
        (["up"], "numpy", "gpu"),
    ],
)
def test_a_missing_package_is_one_line_that_names_its_extra(
    command: list[str],
    module: str,
    extra: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == module else find(name))
    assert main(command) == 1
    assert capsys.readouterr().err == f"inferbus: {module} not installed: pip install 'inferbus[{extra}]'\n"


def test_flag_environment_and_file_are_one(
    started: list[tuple[Any, ...]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "inferbus.toml"
    file.write_text('[nats]\nurl = ["nats://file:1"]\n[worker]\nslots = 1\ngrace = 1\n')
    monkeypatch.setenv("INFERBUS_CONFIG", str(file))
    monkeypatch.setenv("INFERBUS_SLOTS", "2")
    assert (
        main(["worker", "both", "--slots", "3", "--nats-url", "nats://a:1", "--nats-url", "nats://b:1"]) == 7
    )
    settings = started[0][1]
    assert settings.bus.urls == ("nats://a:1", "nats://b:1")
    assert (settings.worker.slots, settings.worker.grace) == (3, 1.0)


def test_all_that_is_wrong_with_the_settings_is_told_together(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("INFERBUS_GRACE", "soon")
    assert main(["worker", "both", "--slots", "-3", "--nats-url", "http://x"]) == 2
    told = capsys.readouterr().err
    assert all(each in told for each in ("worker.slots", "worker.grace", "nats.url"))
    assert "Traceback" not in told


@pytest.mark.parametrize(
    "arguments",
    [
        ["nonsense"],
        ["worker"],
        ["worker", "router"],
        ["chat"],
        ["chat", "a", "b", "c"],
        ["chat", "--nonsense", "a"],
        ["tokens", "a"],
        ["tokens", ""],
        ["tokens", "-1"],
        ["complete", "x", "--param", "top_p"],
        ["submit", "poem", "m"],
        ["submit", "chat", "m", "no-such-file"],
        ["workers", "--config", "no-such-file"],
    ],
)
def test_wrong_usage_is_a_line_and_the_code_2(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    told = capsys.readouterr()
    assert told.err
    assert "Traceback" not in told.err
    assert told.out == ""


BATCH_LINE = b'{"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": {"messages": []}}'


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"[1, 2", "not valid application/json"),
        (b" \n\n", "the body is empty"),
        (b'{"a": 1}\n{"b": 2}\n', "inferbus batch run"),
        (BATCH_LINE + b"\n" + BATCH_LINE, "inferbus batch run"),
        (BATCH_LINE, "the body is a line of a batch file"),
        ('{"a": 1}'.encode("utf-16"), "the body is UTF-16"),
        (b'{"a": "\xff"}', "not valid application/json: Invalid UTF-8"),
    ],
)
@pytest.mark.parametrize("way", ["file", "@file", "stdin"])
def test_a_body_that_is_no_job_says_what_it_is(
    body: bytes,
    said: str,
    way: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    file = tmp_path / "body"
    file.write_bytes(body)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(body)))
    argument = {"file": str(file), "@file": f"@{file}", "stdin": "-"}[way]
    assert main(["submit", "chat", "m", argument, *NOBODY]) == 2
    assert said in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize("way", ["file", "inline"])
def test_a_body_may_begin_with_a_byte_order_mark_or_be_the_argument(
    way: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "body"
    file.write_bytes(b"\xef\xbb\xbf{}")
    assert main(["submit", "chat", "m", str(file) if way == "file" else '{"messages": []}', *NOBODY]) == 3


def test_a_text_that_names_a_file_is_not_sent_by_mistake(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "question.txt"
    file.write_text("Where?")
    assert main(["chat", "m", str(file), *NOBODY]) == 2
    assert f"{file} is a file: @{file} sends its content" in capsys.readouterr().err
    assert main(["chat", "m", f"@{file}.gone", *NOBODY]) == 2
    assert main(["chat", "m", f"@{file}", *NOBODY]) == 3
    assert main(["chat", "m", f"what is in {file}?", *NOBODY]) == 3


def test_bytes_that_are_no_text_are_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"\xff\xfe"), encoding="utf-8"))
    assert main(["chat", "m", "-", *NOBODY]) == 2
    assert "standard input is not UTF-8 text" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [
        ["chat", "BYTES", "Hi"],
        ["chat", "m", "BYTES"],
        ["chat", "m", "@BYTES"],
        ["chat", "m", "Hi", "--param", "BYTES=1"],
        ["chat", "m", "Hi", "--param", "a=BYTES"],
        ["tokens", "m", "BYTES"],
        ["submit", "chat", "m", "BYTES"],
        ["submit", "chat", "m", "{}", "--owner", "BYTES"],
        ["submit", "chat", "m", '{"a": "BYTES"}'],
        ["result", "BYTES"],
        ["jobs", "show", "BYTES"],
        ["pause", "BYTES"],
        ["workers", "--nats-url", "BYTES"],
        ["workers", "--nats-url", "nats://BYTES:1"],
        ["workers", "--nats-user", "BYTES", "--nats-password", "p"],
        ["workers", "--config", "BYTES"],
        ["BYTES"],
    ],
    ids=" ".join,
)
def test_bytes_in_arguments_are_no_traceback(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    given = [argument.replace("BYTES", "\udcff") for argument in arguments]
    assert main([*given, *(() if "--nats-url" in given or len(given) == 1 else NOBODY)]) in (1, 2, 3)
    assert "Traceback" not in capsys.readouterr().err


def test_the_model_is_an_argument_and_the_option_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chat", "--model", "m", "Hi"]) == 2
    assert "the model is an argument: inferbus chat MODEL TEXT" in capsys.readouterr().err


def test_unknown_variables_are_warned_of(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("INFERBUS_SLOTZ", "3")
    main(["config"])
    assert "inferbus: warning: unknown variable INFERBUS_SLOTZ; did you mean" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--tp", "2"], "scripted workers take no SGLang flags: --tp"),
        (["--slots", "-1"], "worker.slots"),
        (["--worker", "w1"], "--worker names one worker"),
    ],
)
def test_what_up_cannot_pass_on_is_refused(
    flags: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "s.toml"
    script.write_text("")
    assert main(["up", "--scripted", str(script), *flags]) == 2
    assert said in capsys.readouterr().err


def test_parameters_are_json_or_text() -> None:
    assert parse_params(
        ("top_p=0.5", "stop=a=b", "stop_token_ids=[1, 2]", 'user="x"', "ignore_eos=true")
    ) == {
        "top_p": 0.5,
        "stop": "a=b",
        "stop_token_ids": [1, 2],
        "user": "x",
        "ignore_eos": True,
    }


@pytest.mark.parametrize(
    ("kind", "code"),
    [
        (InvalidRequest, 1),
        (PayloadTooLarge, 1),
        (Overloaded, 1),
        (Cancelled, 1),
        (DeadlineExceeded, 1),
        (BusUnavailable, 3),
        (NotPermitted, 3),
        (NoWorker, 4),
        (TimedOut, 5),
    ],
)
def test_every_error_has_its_exit_code(kind: type[InferbusError], code: int) -> None:
    assert exit_code(kind("x")) == code


def test_an_error_is_one_line_with_its_code(capsys: pytest.CaptureFixture[str]) -> None:
    async def fail() -> int:
        raise InvalidRequest("two\nlines")

    assert run_coroutine(fail) == 1
    assert capsys.readouterr().err == "inferbus: invalid_request: two lines\n"


def test_an_interrupt_is_the_code_130(capsys: pytest.CaptureFixture[str]) -> None:
    async def interrupted() -> int:
        raise KeyboardInterrupt

    assert run_coroutine(interrupted) == 130
    assert "Traceback" not in capsys.readouterr().err


def test_no_server_is_the_code_3(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["workers", "--nats-url", "nats://127.0.0.1:1"]) == 3
    assert capsys.readouterr().err.startswith(
        "inferbus: bus_unavailable: no NATS server at nats://127.0.0.1:1"
    )


def test_health_knows_but_two_codes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["health", "--nats-url", "nats://127.0.0.1:1"]) == 1
    assert "no NATS server" in capsys.readouterr().err


def test_the_settings_are_printed_as_a_file_without_secrets(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("INFERBUS_NATS_TOKEN", "hush")
    assert (
        main(["config", "--nats-url", "nats://me:hush@host:1", "--classes", "batch:2", "--slots", "9"]) == 0
    )
    shown = capsys.readouterr().out
    assert "hush" not in shown
    assert "# worker = random" in shown
    table = tomllib.loads(shown)
    assert table["nats"]["url"] == ["nats://***@host:1"]
    assert table["nats"]["token"] == "***"
    assert (table["worker"]["classes"], table["worker"]["slots"]) == ({"batch": 2}, 9)
    monkeypatch.delenv("INFERBUS_NATS_TOKEN")
    file = tmp_path / "inferbus.toml"
    file.write_text(shown)
    assert main(["config", "--config", str(file)]) == 0
    assert capsys.readouterr().out == shown


def test_help_needs_nothing_but_the_plain_installation() -> None:
    extras = ("torch", "sglang", "nixl", "transformers", "numpy", "gguf", "uvloop", "prometheus_client")
    code = (
        f"import sys; from inferbus.workers.cli import main; sys.modules |= dict.fromkeys({extras!r}); "
        f"sys.exit(max(main([command, '--help']) for command in {COMMANDS!r}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_it_runs_as_a_module() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "inferbus.workers.cli", "--version"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.startswith("inferbus, version")


def test_the_documentation_names_every_command_and_exit_code() -> None:
    page = Path("docs/cli.md").read_text()
    for command in COMMANDS:
        assert f"| `{command}" in page
    for code in (0, 1, 2, EXIT_NATS, EXIT_NO_WORKER, EXIT_TIMED_OUT, EXIT_INTERRUPTED):
        assert f"| {code} |" in page


def test_control_characters_of_messages_are_escaped(capsys: pytest.CaptureFixture[str]) -> None:
    assert readable(b"a\x1b[2J\xc2\x9b2J\x07\n\xff") == "a\\x1b[2J\\x9b2J\\x07\n\\xff"
    print_json({"id": "a\x1b[2J\x9b2J"})
    print_error("no \x1b[2J\x9b2J")
    told = capsys.readouterr()
    assert json.loads(told.out) == {"id": "a\x1b[2J\x9b2J"}
    assert not any(char in told.out + told.err for char in "\x1b\x9b")
