"""Whole batches: a real server, real worker processes with scripted engines, and whatever dies meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from inferbus import batch
from inferbus.workers.batch import submitter
from inferbus.workers.batch.errors import BatchChanged, BatchHeld
from inferbus.workers.batch.runs import Options, begin, proceed, run
from inferbus.workers.batch.state import Batches
from inferbus.workers.bus.jetstream import layout
from inferbus.workers.bus.jetstream.client import JetStream
from inferbus.workers.client import Client
from inferbus.workers.stack.server import NatsServer
from tests.support.batches import line, read, reconcile, write
from tests.support.eventually import eventually
from tests.support.fleet import Fleet, fleet


@pytest.fixture
async def workers(server: NatsServer, tmp_path: Path) -> AsyncIterator[Fleet]:
    async with fleet(server, tmp_path) as found:
        yield found


@pytest.fixture
async def client(server: NatsServer) -> AsyncIterator[Client]:
    async with Client.connect(server.url, owner="me") as found:
        yield found


async def test_every_line_is_answered_once(workers: Fleet, client: Client, tmp_path: Path) -> None:
    await workers.start(slots=64)
    source = write(tmp_path / "in.jsonl", [line(n) for n in range(1, 501)])
    record = await run(client, await begin(client, source, Options()))
    assert record.status == "completed"
    assert record.counts.succeeded == record.source.lines == 500
    reconcile(
        tmp_path / "in.output.jsonl", tmp_path / "in.errors.jsonl", [f"line-{n}" for n in range(1, 501)]
    )
    assert not (tmp_path / "in.errors.jsonl").exists()
    for each in read(tmp_path / "in.output.jsonl"):
        number = int(each["custom_id"].removeprefix("line-"))
        assert each["response"]["status_code"] == 200
        assert each["error"] is None
        assert each["response"]["body"]["choices"][0]["token_ids"] == [number + 1, number + 2]
    info = await JetStream(client.bus).call(f"STREAM.INFO.{layout.JOBS}")
    assert info["state"]["last_seq"] - info["config"]["first_seq"] < 100, "lines are sent in bundles"
    assert await left_behind(client) == []


async def test_a_completion_has_openais_16_tokens_unless_it_says_otherwise(
    workers: Fleet, client: Client
) -> None:
    await workers.start("both", "[[rules]]\nlength = 40\n", slots=8)
    more: list[dict[str, Any]] = [{}, {"max_tokens": None}, {"max_tokens": 30}]
    more += [{"sampling_params": {"max_new_tokens": 5}}, {"sampling_params": {"temperature": 0}}]
    rows = [{"model": "scripted", "prompt": "a", **each} for each in more]
    lines = [each async for each in client.batch(rows, kind="completions", ordered=True)]
    assert [each["response"]["body"]["usage"]["completion_tokens"] for each in lines] == [16, 16, 30, 5, 16]


async def test_a_line_with_an_adapter_goes_to_its_model_and_keeps_it(workers: Fleet, client: Client) -> None:
    """This engine has none, and says so; with `model`, only another model's name is replaced."""
    await workers.start(slots=8)
    rows = [{"model": name, "token_ids": [1], "max_tokens": 1} for name in ("scripted:blue", "scripted")]
    for model in (None, "scripted"):
        first, second = [
            each async for each in client.batch(rows, kind="tokens", model=model, ordered=True, reorder=False)
        ]
        assert first["response"]["body"]["error"]["param"] == "lora_path"
        assert second["response"]["status_code"] == 200


async def test_rows_of_a_program_are_answered_with_and_without_a_loop(
    workers: Fleet, client: Client, server: NatsServer
) -> None:
    await workers.start(slots=8)
    rows = [{"model": "scripted", "token_ids": [n], "max_tokens": 1} for n in range(20)]
    lines = [each async for each in client.batch(rows, kind="tokens")]
    assert sorted(int(each["custom_id"]) for each in lines) == list(range(20))
    ordered = await asyncio.to_thread(lambda: list(batch(rows, url=server.url, kind="tokens", ordered=True)))
    assert [each["response"]["body"]["choices"][0]["token_ids"] for each in ordered] == [
        [n + 1] for n in range(20)
    ]
    assert await Batches(client.bus, "me").all() == []


async def test_a_row_that_kills_its_worker_becomes_its_error_line_and_no_other_does(
    workers: Fleet, client: Client, tmp_path: Path
) -> None:
    deadly = '[[rules]]\nfirst_token = 666\n[rules.fault]\ndo = "kill"\nat = 1\n[[rules]]\n'
    restarting = asyncio.create_task(restarted(workers, deadly, slots=4, max_attempts=1))
    source = write(
        tmp_path / "in.jsonl",
        [*(line(n) for n in range(1, 40)), line(40, prompt=666), *(line(n) for n in range(41, 60))],
    )
    try:
        record = await run(client, await begin(client, source, Options()))
    finally:
        restarting.cancel()
    assert (record.counts.succeeded, record.counts.errored) == (58, 1)
    (failed,) = read(tmp_path / "in.errors.jsonl")
    assert failed["custom_id"] == "line-40"
    assert failed["response"]["status_code"] == 500
    assert failed["response"]["body"]["error"]["code"] == "attempts_exhausted"
    reconcile(tmp_path / "in.output.jsonl", tmp_path / "in.errors.jsonl", [f"line-{n}" for n in range(1, 60)])


async def restarted(workers: Fleet, script: str, **settings: Any) -> None:
    """Keeps one worker running."""
    while True:
        # Not waited for until it is ready: it may be killed by its first job before anybody has noticed.
        child = await workers.start("both", script, ready=False, **settings)
        await child.wait()


async def test_a_submitter_that_is_killed_is_followed_without_a_line_twice_or_missing(
    workers: Fleet, client: Client, server: NatsServer, tmp_path: Path
) -> None:
    slow = "[[rules]]\ndelay = 0.02\n"
    await workers.start("both", slow, slots=32)
    count, output = 1500, tmp_path / "out.jsonl"
    source = write(tmp_path / "in.jsonl", [line(n) for n in range(1, count + 1)])
    partial = tmp_path / "out.jsonl.partial"
    for written in (1, 300, 700):
        child = await workers.spawn(f"batch-{written}", command(source, output), OWNER="me")
        await until_written(partial, written)
        child.kill()
        await child.wait()
    before = [each["id"] for each in read_whole(partial)]
    record = await run(client, await begin(client, source, Options(output=output)))
    assert record.counts.succeeded == count
    assert [each["id"] for each in read(output)][: len(before)] == before
    reconcile(output, tmp_path / "out.errors.jsonl", [f"line-{n}" for n in range(1, count + 1)])
    assert await left_behind(client) == []


async def test_the_server_and_the_workers_may_be_killed_meanwhile(
    workers: Fleet, client: Client, server: NatsServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(submitter, "SILENCE", 0.5)
    slow = "[[rules]]\ndelay = 0.05\n"
    first = await workers.start("both", slow, slots=32)
    count = 800
    source = write(tmp_path / "in.jsonl", [line(n) for n in range(1, count + 1)])
    partial = tmp_path / "in.output.jsonl.partial"
    running = asyncio.create_task(run(client, await begin(client, source, Options())))
    await until_written(partial, 50)
    await server.kill()
    await server.restart()
    await until_written(partial, 200)
    first.kill()
    await workers.start("both", slow, slots=32)
    record = await running
    assert record.counts.succeeded == count
    reconcile(
        tmp_path / "in.output.jsonl", tmp_path / "in.errors.jsonl", [f"line-{n}" for n in range(1, count + 1)]
    )


async def test_a_killed_worker_loses_no_line_that_had_ended(
    workers: Fleet, client: Client, tmp_path: Path
) -> None:
    """One bundle, of which one line never ends."""
    worker = await workers.start("both", "[[rules]]\nfirst_token = 8\ndelay = 60\n[[rules]]\n", slots=32)
    source = write(tmp_path / "in.jsonl", [line(n) for n in range(1, 9)])
    running = asyncio.create_task(run(client, await begin(client, source, Options())))
    partial, output = tmp_path / "in.output.jsonl.partial", tmp_path / "in.output.jsonl"
    await until_written(partial, 7)
    before = read_whole(partial)
    worker.kill()
    await workers.start(slots=32)
    assert (await running).counts.succeeded == 8
    assert read(output)[:7] == before
    assert len({each["response"]["request_id"] for each in before}) == 1


async def test_a_cancelled_batch_has_a_line_for_every_line_and_a_retry_runs_the_rest(
    workers: Fleet, client: Client, tmp_path: Path
) -> None:
    await workers.start("both", "[[rules]]\ndelay = 0.2\n", slots=16)
    count = 200
    source = write(tmp_path / "in.jsonl", [line(n) for n in range(1, count + 1)])
    output, errors = tmp_path / "in.output.jsonl", tmp_path / "in.errors.jsonl"
    begun = await begin(client, source, Options())
    running = asyncio.create_task(run(client, begun))
    partial = tmp_path / "in.output.jsonl.partial"
    await until_written(partial, 30)
    await Batches(client.bus, "me").ask_cancel(begun.kept.record.id)
    record = await running
    assert record.status == "cancelled"
    reconcile(output, errors, [f"line-{n}" for n in range(1, count + 1)])
    assert {each["error"]["code"] for each in read(errors)} == {"batch_cancelled"}
    assert record.counts.succeeded + record.counts.cancelled == count
    record = await run(client, await proceed(client, record.id, retry=True))
    assert (record.status, record.counts.succeeded, record.counts.ended) == ("completed", count, count)
    reconcile(output, errors, [f"line-{n}" for n in range(1, count + 1)])


@pytest.mark.parametrize("state", ["begun", "waiting for workers", "running", "abandoned", "cancelling"])
async def test_a_batch_is_cancelled_in_every_state(
    workers: Fleet, client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, state: str
) -> None:
    monkeypatch.setattr(submitter, "CANCEL_GRACE", 1.0)
    if state != "waiting for workers":
        await workers.start("both", "[[rules]]\ndelay = 0.2\n", slots=8)
    source = write(tmp_path / "in.jsonl", [line(n) for n in range(1, 201)])
    partial = tmp_path / "in.output.jsonl.partial"
    batches, begun = Batches(client.bus, "me"), await begin(client, source, Options())
    batch_id = begun.kept.record.id
    if state != "begun":
        running = asyncio.create_task(run(client, begun))
        await until_written(partial, 0 if state == "waiting for workers" else 9)
        if state == "abandoned":
            running.cancel()
            await asyncio.wait({running})
    await batches.ask_cancel(batch_id)
    if state == "cancelling":
        await eventually(lambda: begun.kept.record.status == "cancelling")
        await batches.ask_cancel(batch_id)
        running.cancel()
        await asyncio.wait({running})
    if state in ("begun", "abandoned", "cancelling"):
        running = asyncio.create_task(run(client, await proceed(client, batch_id)))
    record = await running
    assert (record.status, record.counts.ended) == ("cancelled", 200)
    reconcile(
        tmp_path / "in.output.jsonl", tmp_path / "in.errors.jsonl", [f"line-{n}" for n in range(1, 201)]
    )
    assert {each["error"]["code"] for each in read(tmp_path / "in.errors.jsonl")} == {"batch_cancelled"}


async def test_what_was_purged_from_the_queue_is_sent_again(
    client: Client, workers: Fleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(submitter, "SILENCE", 0.2)
    source = write(tmp_path / "in.jsonl", [line(n) for n in range(1, 31)])
    running = asyncio.create_task(run(client, await begin(client, source, Options())))
    jetstream = JetStream(client.bus)

    async def queued() -> bool:
        info = await jetstream.call(f"STREAM.INFO.{layout.JOBS}")
        return bool(info["state"]["messages"] >= 2)

    await eventually(queued)
    await jetstream.call(f"STREAM.PURGE.{layout.JOBS}")
    await workers.start(slots=8)
    record = await running
    assert record.counts.succeeded == 30


async def test_a_batch_whose_jobs_were_lost_leaves_nothing_and_neither_does_one_that_is_removed(
    workers: Fleet, client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a server brings back, and what a worker that died leaves of a job that was purged."""
    monkeypatch.setattr(submitter, "SILENCE", 0.2)
    source = write(tmp_path / "in.jsonl", [line(n) for n in range(1, 31)])
    begun = await begin(client, source, Options())
    batch, jetstream, subjects = begun.kept.record.id, JetStream(client.bus), client.bus.subjects

    async def plant() -> None:
        for name in (f"{batch}-1000", f"{batch}0-1"):
            await jetstream.store(subjects.result("me", name), b"{}")
            await jetstream.store(subjects.attempts("me", name, 1), b"")

    running = asyncio.create_task(run(client, begun))

    async def queued() -> bool:
        info = await jetstream.call(f"STREAM.INFO.{layout.JOBS}")
        return bool(info["state"]["messages"] >= 2)

    await eventually(queued)
    await plant()
    await jetstream.call(f"STREAM.PURGE.{layout.JOBS}")
    await workers.start(slots=8)
    assert (await running).counts.succeeded == 30
    anothers = [subjects.attempts("me", f"{batch}0-1", 1), subjects.result("me", f"{batch}0-1")]
    assert sorted(await left_behind(client, within=1)) == anothers
    await plant()
    await Batches(client.bus, "me").remove((await Batches(client.bus, "me").get(batch)).record)
    assert sorted(await left_behind(client, within=1)) == anothers


async def test_of_two_processes_that_run_one_batch_one_is_refused(
    workers: Fleet, client: Client, tmp_path: Path
) -> None:
    await workers.start("both", "[[rules]]\ndelay = 0.05\n", slots=4)
    source = write(tmp_path / "in.jsonl", [line(n) for n in range(1, 101)])
    running = asyncio.create_task(run(client, await begin(client, source, Options())))
    await eventually((tmp_path / "in.output.jsonl.partial").exists)
    with pytest.raises(BatchHeld):
        await run(client, await begin(client, source, Options()))
    assert (await running).counts.succeeded == 100


async def test_a_grown_file_runs_its_new_lines_and_a_changed_one_is_refused(
    workers: Fleet, client: Client, tmp_path: Path
) -> None:
    await workers.start(slots=8)
    path = tmp_path / "in.jsonl"
    first = await run(client, await begin(client, write(path, [line(1), line(2)]), Options()))
    same = await begin(client, path, Options())
    assert same.complete
    grown = await run(client, await begin(client, write(path, [line(1), line(2), line(3)]), Options()))
    assert (first.counts.succeeded, grown.counts.succeeded) == (2, 3)
    assert [each["custom_id"] for each in read(tmp_path / "in.output.jsonl")][-1] == "line-3"
    with pytest.raises(BatchChanged, match="first 3 lines have changed"):
        await begin(client, write(path, [line(1), line(9), line(3)]), Options())


async def test_a_full_disk_stops_the_batch_and_the_same_command_goes_on(
    workers: Fleet, client: Client, server: NatsServer, tmp_path: Path
) -> None:
    await workers.start(slots=32)
    count, output = 400, tmp_path / "out.jsonl"
    source = write(tmp_path / "in.jsonl", [line(n) for n in range(1, count + 1)])
    limited = ["bash", "-c", 'ulimit -f 20; trap "" XFSZ; exec "$@"', "bash", *command(source, output)]
    child = await workers.spawn("limited", limited, OWNER="me")
    assert await child.wait() == 1
    assert "output_failed" in child.log.read_text()
    assert (tmp_path / "out.jsonl.partial").read_bytes().endswith(b"\n")
    record = await run(client, await begin(client, source, Options(output=output)))
    assert record.counts.succeeded == count
    reconcile(output, tmp_path / "out.errors.jsonl", [f"line-{n}" for n in range(1, count + 1)])


@pytest.fixture
def inferbus(server: NatsServer) -> Callable[..., Awaitable[tuple[int, str]]]:
    """Runs `inferbus batch`; returns its exit code and what it printed."""

    async def running(*arguments: str, stdin: bytes = b"") -> tuple[int, str]:
        child = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "inferbus.workers.cli", "batch", *arguments, "--nats-url", server.url),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        out, _ = await child.communicate(stdin)
        assert child.returncode is not None
        return child.returncode, out.decode()

    return running


async def test_the_command_runs_shows_lists_and_forgets_a_batch(
    workers: Fleet, inferbus: Callable[..., Awaitable[tuple[int, str]]], tmp_path: Path
) -> None:
    await workers.start(slots=8)
    source = write(tmp_path / "in.jsonl", [line(2), "{broken", line(1)])

    code, text = await inferbus("run", str(source))
    assert (code, "line 2: invalid_json_line" in text) == (1, True)
    code, text = await inferbus("run", str(source), "--skip-invalid", "--ordered")
    assert (code, "3/3 done" in text) == (1, True)
    code, text = await inferbus("ls", "--json")
    listed = json.loads(text)
    assert listed["status"] == "completed"
    assert listed["request_counts"]["errored"] == 1
    code, text = await inferbus("status", listed["id"])
    assert (code, "succeeded 2" in text) == (0, True)
    code, text = await inferbus("fetch", listed["id"])
    assert [json.loads(each)["custom_id"] for each in text.splitlines()] == ["line-2", "line-1"]
    assert (await inferbus("cancel", listed["id"]))[0] == 1
    assert (await inferbus("rm", listed["id"]))[0] == 0
    assert (await inferbus("status", listed["id"]))[0] == 1


async def test_a_batch_runs_by_itself_once_it_is_submitted_and_is_waited_for_and_cancelled_by_its_id(
    workers: Fleet, inferbus: Callable[..., Awaitable[tuple[int, str]]], tmp_path: Path
) -> None:
    source = write(tmp_path / "in.jsonl", [line(1), line(2)])
    code, text = await inferbus("submit", str(source))
    batch_id = text.split()[-1]
    assert code == 0
    # Nobody serves its model.
    assert (await inferbus("cancel", batch_id))[0] == 0
    code, text = await inferbus("wait", batch_id)
    assert (code, "cancelled" in text) == (130, True)
    code, text = await inferbus("fetch", batch_id, "--failed")
    assert [json.loads(each)["error"]["code"] for each in text.splitlines()] == ["batch_cancelled"] * 2
    await workers.start(slots=8)
    code, text = await inferbus("retry", batch_id)
    assert (code, "2/2 done" in text) == (0, True), text
    code, text = await inferbus("ls")
    assert code == 0
    assert text.splitlines()[1].split()[:3] == [batch_id, "completed", "2/2"]
    output = tmp_path / "piped.jsonl"
    code, text = await inferbus("run", "-", "--output", str(output), "--json", stdin=source.read_bytes())
    assert (code, json.loads(text.splitlines()[-1])["request_counts"]["completed"]) == (0, 2)
    assert {each["custom_id"] for each in read(output)} == {"line-1", "line-2"}


def command(source: Path, output: Path) -> list[str]:
    """The command line that runs a batch."""
    return [
        sys.executable,
        "-m",
        "inferbus.workers.cli",
        "batch",
        "run",
        str(source),
        "--output",
        str(output),
    ]


async def until_written(path: Path, lines: int) -> None:
    """Waits until a growing file has so many lines."""
    await eventually(lambda: path.exists() and path.read_bytes().count(b"\n") >= lines, within=30)


def read_whole(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a file that is being written."""
    return [json.loads(raw) for raw in path.read_bytes().split(b"\n")[:-1]]


async def left_behind(client: Client, *, within: float = 5) -> list[str]:
    """What is on the server of a batch beside its record, after a moment in which it may go."""
    found: list[str] = []

    async def empty() -> bool:
        found.clear()
        for stream in (layout.JOBS, layout.RESULTS):
            info = await JetStream(client.bus).call(f"STREAM.INFO.{stream}", {"subjects_filter": ">"})
            found.extend(info["state"].get("subjects") or {})
        return not found

    with contextlib.suppress(AssertionError):
        await eventually(empty, within=within)
    return found


async def test_a_line_and_an_answer_over_the_payload_limit_are_lines_like_others(
    workers: Fleet, client: Client, tmp_path: Path
) -> None:
    await workers.start(
        "both", "context_length = 900000\nburst = 4096\n[[rules]]\nlength = 200000\n", slots=8
    )
    large = {3: {"token_ids": [32_000] * 400_000}, 5: {"max_tokens": 200_000}}
    lines = [line(n) for n in range(1, 9)]
    for number, change in large.items():
        lines[number - 1]["body"] |= change
    source = write(tmp_path / "in.jsonl", lines)
    record = await run(client, await begin(client, source, Options()))
    assert (record.status, record.counts.succeeded) == ("completed", 8)
    answers = {each["custom_id"]: each["response"]["body"] for each in read(tmp_path / "in.output.jsonl")}
    assert answers["line-3"]["usage"]["prompt_tokens"] == 400_000
    assert len(answers["line-5"]["choices"][0]["token_ids"]) == 200_000
