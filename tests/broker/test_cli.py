"""The command line against a real server and a real worker process with a scripted engine."""

from __future__ import annotations

import asyncio
import io
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress

import msgspec
import pytest
import pytest_asyncio

from inferbus.workers.bus.fleet.registry import announce, withdraw
from inferbus.workers.cli import main, waiting
from inferbus.workers.client import Client
from inferbus.workers.config import WorkerSettings
from inferbus.workers.roles.description import Description
from inferbus.workers.stack.server import NatsServer
from tests.support.eventually import eventually
from tests.support.fleet import Fleet, fleet

SCRIPT = """
tokenizer = true
[[rules]]
user = "endless"
length = 30000
delay = 0.01
[[rules]]
user = "fails"
[rules.fault]
at = 3
do = "fail"
code = "context_length_exceeded"
[[rules]]
user = "greek"
text = "\\u03c0 = 3"
[[rules]]
text = "The capital of France is Paris."
cached_tokens = 5
"""
PARIS = "The capital of France is Paris."

pytestmark = pytest.mark.asyncio(loop_scope="module")

Run = Callable[..., Awaitable[tuple[int, str, str]]]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def workers(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[tuple[NatsServer, Fleet]]:
    directory = tmp_path_factory.mktemp("cli")
    async with (
        NatsServer(directory / "nats", sync_interval=None) as server,
        fleet(server, directory) as found,
    ):
        await found.start("both", SCRIPT)
        yield server, found


@pytest.fixture
def url(workers: tuple[NatsServer, Fleet], monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("INFERBUS_NATS_URL", workers[0].url)
    return workers[0].url


@pytest.fixture
def run(url: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs a command; its exit code, and what it wrote to standard output and standard error."""

    async def running(*arguments: str, stdin: str = "") -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin.encode())))
        code = await asyncio.to_thread(main, arguments)
        said = capsys.readouterr()
        assert "Traceback" not in said.err
        return code, said.out, said.err

    return running


async def test_a_chat_shows_the_answer_and_the_statistics(run: Run) -> None:
    code, out, err = await run("chat", "What is the capital of France?", "--system", "Be brief.")
    assert (code, out) == (0, f"{PARIS}\n")
    assert err.startswith("31 tokens · first after ")
    assert "worker w1" in err
    assert "5 cached" in err


async def test_the_model_may_be_named_and_the_text_piped(run: Run) -> None:
    assert await run("chat", "scripted", "-", "-q", stdin="Where?") == (0, f"{PARIS}\n", "")


async def test_the_answer_can_be_had_as_json(run: Run) -> None:
    code, out, _ = await run("chat", "Where?", "--json", "--max-tokens", "3", "--temperature", "0")
    answer = json.loads(out)
    assert code == 0
    assert answer["object"] == "chat.completion"
    assert answer["choices"][0]["message"]["content"] == "The"
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == 3


async def test_a_text_is_continued(run: Run) -> None:
    assert (await run("complete", "Where"))[:2] == (0, f"{PARIS}\n")


async def test_a_text_becomes_tokens_and_tokens_a_text(run: Run) -> None:
    assert await run("tokenize", "hi") == (0, "104 105\n", "")
    assert await run("detokenize", "scripted", "104, 105") == (0, "hi\n", "")
    code, out, _ = await run("tokenize", "-", "--json", "--timeout", "20", stdin="hi")
    assert (code, json.loads(out)["tokens"]) == (0, [104, 105])
    code, _, err = await run("tokenize", "hi", "--param", "made_up=1")
    assert code == 0
    assert err.startswith("warning: unknown field")


async def test_a_model_that_generates_says_what_embeddings_need(run: Run) -> None:
    code, out, err = await run("embeddings", "hi")
    assert code != 0
    assert not out
    assert "--is-embedding" in err


async def test_tokens_go_in_and_tokens_come_out(run: Run) -> None:
    for ids in ("1,2,3", "1 2 3", "[1, 2, 3]"):
        code, out, _ = await run("tokens", ids, "--max-tokens", "3")
        assert (code, out.split()) == (0, [str(byte) for byte in b"The"])


async def test_what_was_ignored_is_said(run: Run) -> None:
    code, _, err = await run("chat", "Where?", "--param", "colour=red")
    assert code == 0
    assert "warning: unknown field 'colour' ignored" in err


async def test_a_refused_request_is_one_line(run: Run) -> None:
    code, out, err = await run("chat", "Where?", "--param", "top_p=3")
    assert (code, out) == (1, "")
    assert err.startswith("inferbus: invalid_request: ")
    assert err.count("\n") == 1


async def test_an_error_in_mid_answer_comes_after_what_was_said(run: Run) -> None:
    code, out, err = await run("tokens", "1", "--param", "user=fails")
    assert (code, len(out.split())) == (1, 3)
    assert err.startswith("inferbus: context_length_exceeded: ")


async def test_a_model_that_nobody_serves_is_the_code_4(run: Run) -> None:
    assert (await run("chat", "nobody", "Hi"))[0] == 4


async def test_workers_are_listed(run: Run) -> None:
    code, out, _ = await run("workers")
    assert code == 0
    head, line = out.splitlines()
    assert head.split()[:4] == ["model", "role", "worker", "state"]
    assert line.split()[:4] == ["scripted", "both", "w1", "ready"]
    code, out, _ = await run("workers", "--json")
    assert [info["worker"] for info in json.loads(out)] == ["w1"]


async def test_health_tells_whether_a_worker_is_ready(run: Run) -> None:
    assert await run("health") == (0, "", "")
    assert await run("health", "--here", "--role", "both", "--worker", "w1", "--model", "scripted") == (
        0,
        "",
        "",
    )
    assert await run("health", "--worker", "other") == (1, "", "inferbus: no such worker is announced\n")


async def test_a_job_is_submitted_streamed_and_kept(run: Run) -> None:
    body = '{"messages": [{"role": "user", "content": "Where?"}]}'
    code, out, _ = await run("submit", "chat", "scripted", "--job-id", "paris", stdin=body)
    assert code == 0
    submitted = out.split()
    assert submitted[0] == "paris"
    assert (await run("submit", "chat", "scripted", "--job-id", "paris", stdin=body))[1] == (
        f"paris {submitted[1]} (submitted before)\n"
    )
    assert (await run("stream", "paris"))[:2] == (0, f"{PARIS}\n")
    assert (await run("result", "paris"))[:2] == (0, f"{PARIS}\n")
    code, out, _ = await run("result", "paris", "--json")
    assert json.loads(out)["choices"][0]["message"]["content"] == PARIS


async def test_a_job_can_be_waited_for_where_it_is_submitted(run: Run) -> None:
    code, out, err = await run("submit", "tokens", "scripted", "--wait", stdin='{"token_ids": [1]}')
    assert (code, bytes(map(int, out.split())).decode()) == (0, PARIS)
    assert "31 tokens" in err


BODY = '{"token_ids": [1]}'


async def test_a_model_that_nobody_serves_is_told_with_those_that_are_served(run: Run) -> None:
    code, _, err = await run("chat", "scriptd", "Hi")
    assert (code, err) == (
        4,
        "inferbus: no_worker: no worker serves the model 'scriptd'; served are: scripted\n",
    )
    code, _, err = await run("submit", "tokens", "scriptd", "--job-id", "typo", stdin=BODY)
    assert code == 1
    assert "model_not_found: nobody has ever served the model 'scriptd'; served are: scripted" in err


async def test_jobs_of_a_model_are_accepted_before_it_is_served_once_its_queue_is_made(run: Run) -> None:
    assert (await run("init", "scriptd"))[:2] == (0, "jobs of scriptd are accepted\n")
    code, out, _ = await run("submit", "tokens", "scriptd", "--job-id", "typo", stdin=BODY)
    assert (code, out.split()[0]) == (0, "typo")
    for command in ("result", "stream"):
        code, _, err = await run(command, "typo", "--timeout", "0.2")
        assert code == 5
        assert err.startswith(
            "inferbus: warning: the job waits: no worker serves the model 'scriptd'; served"
        )
    code, out, _ = await run("jobs", "show", "typo")
    assert (code, out[:7]) == (0, "queued:")
    code, _, err = await run("result", "other")
    assert (code, err[:24]) == (1, "inferbus: job_not_found:")
    code, _, err = await run("pause", "other")
    assert (code, err[:26]) == (1, "inferbus: model_not_found:")


async def test_a_command_that_waits_says_when_the_last_worker_goes_and_when_one_comes(
    workers: tuple[NatsServer, Fleet], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(waiting, "LOOK_EVERY", 0.05)
    server, found = workers
    settings = WorkerSettings(worker="late")
    late = msgspec.structs.replace(
        Description("both", settings, "late").loading(), state="ready", kinds=["chat"]
    )
    said: list[str] = []

    def lines(count: int) -> Callable[[], bool]:
        def told() -> bool:
            said.extend(capsys.readouterr().err.splitlines())
            return len(said) >= count

        return told

    async with (
        Client.connect(server.url) as client,
        waiting.telling_of_workers(client, "late", waiting="the batch"),
    ):
        await eventually(lines(1))
        announce(found.bus, late)
        await eventually(lines(2))
        withdraw(found.bus, late)
        await eventually(lines(3))
    none = "inferbus: warning: the batch waits: no worker serves the model 'late'; served are: scripted"
    assert said == [none, "inferbus: a worker serves the model 'late' now", none]


async def test_a_job_is_shown_without_its_owner_where_that_is_clear(run: Run) -> None:
    for owner in ("a", "b"):
        await run("submit", "tokens", "scripted", "--job-id", "twice", "--owner", owner, stdin=BODY)
        await run("result", "twice", "--owner", owner)
    code, _, err = await run("jobs", "show", "twice")
    assert code == 2
    assert "several owners have a job of this id: a, b" in err
    code, out, _ = await run("jobs", "show", "a", "twice")
    assert (code, "result: ok" in out) == (0, True)
    assert (await run("jobs", "show", "nowhere"))[::2] == (
        1,
        "inferbus: there is no job nowhere of any owner\n",
    )


@pytest.mark.parametrize("encoding", ["cp1252", "latin-1"])
async def test_an_answer_that_the_terminal_cannot_show_is_shown_all_the_same(url: str, encoding: str) -> None:
    child = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "inferbus.workers.cli", "chat", "-q", "Pi?", "--param", "user=greek"),
        env={**os.environ, "PYTHONIOENCODING": encoding},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, err = await child.communicate()
    assert (child.returncode, out, err) == (0, b"\\u03c0 = 3\n", b"")


async def test_bytes_that_are_no_text_are_one_line(url: str) -> None:
    child = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "inferbus.workers.cli", "chat", "-q", b"\xff"),
        env={**os.environ, "PYTHONUTF8": "1"},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, err = await child.communicate()
    assert (child.returncode, out) == (1, b"")
    assert err.startswith(b"inferbus: invalid_request: 'messages' cannot be sent: a text in it is not valid")
    assert err.count(b"\n") == 1


async def test_a_cancelled_job_has_an_error_for_a_result(run: Run) -> None:
    body = '{"token_ids": [1], "user": "endless"}'
    code, out, _ = await run("submit", "tokens", "scripted", "--json", stdin=body)
    job = json.loads(out)
    assert (code, job["owner"]) == (0, "default")
    assert (await run("cancel", job["id"], "--submission", str(job["submission"])))[0] == 0
    code, out, err = await run("result", job["id"])
    assert (code, out) == (1, "")
    assert err.startswith("inferbus: cancelled: ")
    assert (await run("stream", job["id"]))[0] == 1


async def test_another_owner_sees_none_of_it(run: Run) -> None:
    body = '{"token_ids": [1]}'
    await run("submit", "tokens", "scripted", "--job-id", "mine", "--owner", "a", stdin=body)
    assert (await run("result", "mine", "--owner", "a"))[0] == 0
    code, _, err = await run("result", "mine", "--owner", "b")
    assert (code, err[:24]) == (1, "inferbus: job_not_found:")


@pytest.mark.faults
async def test_ctrl_c_stops_the_request(url: str, workers: tuple[NatsServer, Fleet]) -> None:
    command = ["-m", "inferbus.workers.cli", "tokens", "1", "--param", "user=endless"]
    child = await asyncio.create_subprocess_exec(
        sys.executable, *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    try:
        assert child.stdout is not None
        assert child.stderr is not None
        async with asyncio.timeout(30):
            assert await child.stdout.read(1)
            child.send_signal(signal.SIGINT)
            code, said = await child.wait(), await child.stderr.read()
    finally:
        with suppress(ProcessLookupError):
            child.kill()
    assert (code, said) == (130, b"inferbus: interrupted\n")
    await workers[1].idle()


@pytest.mark.faults
async def test_a_reader_that_leaves_stops_the_request(url: str, workers: tuple[NatsServer, Fleet]) -> None:
    command = f"{sys.executable} -m inferbus.workers.cli tokens 1 --param user=endless | head -c 1"
    child = await asyncio.create_subprocess_shell(
        command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    async with asyncio.timeout(30):
        _, said = await child.communicate()
    assert said == b""
    await workers[1].idle()
