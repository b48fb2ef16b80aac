"""Tables as batches: the real command on Parquet and CSV, and frames of Python."""

from __future__ import annotations

import asyncio
import csv
import json
import socket
import sys
from collections.abc import AsyncIterator, Iterable
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from inferbus import batch_frame
from inferbus.schemas.errors import InvalidRequest
from inferbus.workers.batch.errors import InvalidBatch
from inferbus.workers.batch.runs import Options, begin, proceed, run
from inferbus.workers.batch.state import Batches
from inferbus.workers.batch.template import template
from inferbus.workers.client import Client
from inferbus.workers.stack.server import NatsServer
from tests.broker.test_batch import left_behind, read_whole, until_written
from tests.support.batches import read, reconcile
from tests.support.fleet import Fleet, fleet

TOKENS = [
    "--kind", "tokens", "--map", "token_ids=ids", "--map", "custom_id={{name}}-{{n}}",
    "--set", "model=scripted", "--set", "max_tokens=2",
]  # fmt: skip


@pytest.fixture
async def workers(server: NatsServer, tmp_path: Path) -> AsyncIterator[Fleet]:
    async with fleet(server, tmp_path) as found:
        yield found


@pytest.fixture
async def client(server: NatsServer) -> AsyncIterator[Client]:
    async with Client.connect(server.url, owner="me") as found:
        yield found


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "inferbus.workers.cli", "batch", *arguments]


def write(path: Path, numbers: Iterable[int]) -> None:
    """A Parquet file of rows that ask for tokens; those of the number 0 have none."""
    rows = [{"name": "row", "n": n, "ids": [n] if n else None, "unused": "x"} for n in numbers]
    pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=100)


async def test_the_command_goes_on_with_a_parquet_file_that_was_killed_and_has_grown(
    workers: Fleet, client: Client, tmp_path: Path
) -> None:
    await workers.start("both", "[[rules]]\ndelay = 0.02\n", slots=32)
    source, output = tmp_path / "in.parquet", tmp_path / "in.output.jsonl"
    write(source, range(1, 401))
    runs = 0

    async def inferbus(*arguments: str) -> tuple[int | None, str]:
        nonlocal runs
        runs += 1
        child = await workers.spawn(f"batch-{runs}", command(*arguments), OWNER="me")
        return await child.wait(), child.log.read_text()

    child = await workers.spawn("killed", command("run", str(source), *TOKENS), OWNER="me")
    await until_written(partial := tmp_path / "in.output.jsonl.partial", 50)
    child.kill()
    await child.wait()
    before = [each["id"] for each in read_whole(partial)]
    assert len(before) < 400

    (kept,) = await Batches(client.bus, "me").all()
    code, text = await inferbus("resume", kept.record.id)
    assert (code, "400/400 done" in text) == (0, True), text
    assert [each["id"] for each in read(output)][: len(before)] == before
    reconcile(output, tmp_path / "in.errors.jsonl", [f"row-{n}" for n in range(1, 401)])
    for each in read(output):
        number = int(each["custom_id"].removeprefix("row-"))
        assert each["response"]["body"]["choices"][0]["token_ids"] == [number + 1, number + 2]

    write(source, [*range(1, 401), 0, 402])
    code, text = await inferbus("run", str(source), *TOKENS)
    assert (code, "row 401: missing_required_parameter: " in text) == (1, True), text
    write(source, range(1, 403))
    code, text = await inferbus("run", str(source), *TOKENS)
    assert (code, "402/402 done" in text) == (0, True), text
    (changed, said), (missing, named) = await asyncio.gather(
        inferbus("run", str(source), *TOKENS, "--set", "temperature=0.5"),
        inferbus("run", str(source), "--kind", "tokens", "--map", "token_ids=tokens"),
    )
    assert (changed, "the mapping makes others of them" in said) == (1, True), said
    assert (missing, "no column tokens; it has name, n, ids, unused" in named) == (1, True), named
    assert await left_behind(client) == []


async def test_the_command_runs_a_csv_file_by_a_template(
    workers: Fleet, server: NatsServer, tmp_path: Path
) -> None:
    await workers.start(slots=8)
    source = tmp_path / "in.csv"
    with source.open("w", newline="") as file:
        csv.writer(file).writerows([["question", "tag"], ["One,\nor two?", "a"], ["Three"], ["Vier é", "b"]])
    body = {"model": "scripted", "prompt": "{{tag}}: {{question}}", "max_tokens": 2, "echo": True}
    (tmp_path / "body.json").write_text(json.dumps(body))
    mapped = ["--kind", "completions", "--map", f"@{tmp_path / 'body.json'}"]

    async def inferbus(*arguments: str) -> tuple[int | None, str]:
        child = await asyncio.create_subprocess_exec(
            *command(*arguments, "--nats-url", server.url),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        out, _ = await child.communicate()
        return child.returncode, out.decode()

    code, text = await inferbus("run", str(source))
    assert (code, "needs a mapping" in text, "columns are question, tag" in text) == (1, True, True), text
    code, text = await inferbus("run", str(source), "--map", "prompt={{question}")
    assert (code, "a placeholder cannot be read" in text) == (2, True), text
    code, text = await inferbus("run", str(source), *mapped)
    assert (code, "row 2: invalid_value: the row has 1 fields, and the header 2" in text) == (1, True), text
    code, text = await inferbus("run", str(source), *mapped, "--skip-invalid", "--ordered")
    assert (code, "3/3 done" in text) == (1, True), text
    found = {
        each["custom_id"]: each["response"]["body"]["choices"][0]["text"]
        for each in read(tmp_path / "in.output.jsonl")
    }
    assert list(found) == ["row-1", "row-3"]
    assert found["row-1"].startswith("a: One,\nor two?")
    assert found["row-3"].startswith("b: Vier é")
    (error,) = read(tmp_path / "in.errors.jsonl")
    assert error["response"]["body"]["error"]["message"] == "the row has 1 fields, and the header 2"


async def test_another_machine_goes_on_with_a_shared_table_as_a_batch_file(
    workers: Fleet, client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here failed a row that has no tokens, and one that the worker did not like: only that is run again."""
    fault = '[[rules]]\nfirst_token = 7\n[rules.fault]\ndo = "fail"\n[[rules]]\n'
    worker = await workers.start("both", fault, max_attempts=1)
    write(tmp_path / "in.parquet", [1, 2, 0, *range(4, 21)])
    made = template(
        {"token_ids": "ids", "custom_id": "n"}, {"model": "scripted", "max_tokens": 2}, kind="tokens"
    )
    options = Options(shared=True, skip_invalid=True, template=made)
    here = await run(client, await begin(client, tmp_path / "in.parquet", options))
    assert (here.counts.succeeded, here.counts.errored) == (18, 2)
    worker.kill()
    await workers.start()
    with monkeypatch.context() as patch:
        patch.setattr(socket, "gethostname", lambda: "another")
        (tmp_path / "in.parquet").rename(tmp_path / "away.parquet")
        there = tmp_path / "there" / "out.jsonl"
        await run(client, await proceed(client, here.id, output=there))
        record = await run(client, await proceed(client, here.id, retry=True))
        assert (record.counts.succeeded, record.counts.errored) == (19, 1)
        assert len((tmp_path / "there" / "out.jsonl.input.jsonl").read_text().splitlines()) == 20
        (error,) = read(tmp_path / "there" / "out.errors.jsonl")
        assert error["response"]["body"]["error"]["message"] == "column ids: the row has no value"
    # Where the table is, it is the input again, with the mapping that the batch began with.
    write(tmp_path / "away.parquet", [1, 2, 0, *range(4, 22)])
    begun = await proceed(
        client, here.id, source=tmp_path / "away.parquet", output=tmp_path / "in.output.jsonl"
    )
    record = await run(client, begun)
    assert (record.counts.succeeded, record.counts.errored) == (20, 1)
    assert record.source.path.endswith("away.parquet")
    assert len(read(tmp_path / "in.output.jsonl")) == 20


async def test_a_frame_comes_back_with_its_answers(
    workers: Fleet, client: Client, server: NatsServer
) -> None:
    await workers.start(slots=8)
    frame = pd.DataFrame({"ids": [[n] for n in range(1, 40)] + [None]}, index=range(100, 140))

    def work(**options: Any) -> Any:
        fixed = {"model": "scripted", "max_tokens": 2}
        return batch_frame(frame, {"token_ids": "ids"}, fixed, kind="tokens", url=server.url, **options)

    found = await asyncio.to_thread(work, skip_invalid=True)
    assert list(found.index) == list(frame.index)
    assert [list(each) for each in found["answer"][:39]] == [[n + 1, n + 2] for n in range(1, 40)]
    assert list(found["output_tokens"][:39]) == [2] * 39
    assert found["error"].iloc[39] == "column ids: the row has no value"
    with pytest.raises(InvalidBatch, match=r"line 40: .* column ids: the row has no value"):
        await asyncio.to_thread(work)
    with pytest.raises(InvalidRequest, match=r"a table needs `map`.* it has ids"):
        _ = [each async for each in client.batch(frame)]
    rows = ({"text": text} for text in ("One", "Two"))
    lines = client.batch(
        rows, kind="completions", map={"prompt": "Say {{text}}"}, set={"model": "scripted", "echo": True}
    )
    texts = [each["response"]["body"]["choices"][0]["text"] async for each in lines]
    assert sorted(text[:7] for text in texts) == ["Say One", "Say Two"]
