"""The client for programs without an event loop, with scripted workers."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any, TypeVar

import pytest
import pytest_asyncio

from inferbus import JobNotFound, SyncClient
from inferbus.schemas.errors import BusUnavailable, CallerError, Cancelled, NoWorker
from inferbus.workers.stack.server import NatsServer
from tests.support.eventually import eventually
from tests.support.fleet import Fleet, fleet

T = TypeVar("T")

SCRIPT = """
tokenizer = true
[[rules]]
user = "endless"
length = 30000
delay = 0.01
"""
MODEL = "m"
HI = [{"role": "user", "content": "Hi"}]

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def workers(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[tuple[NatsServer, Fleet]]:
    folder = tmp_path_factory.mktemp("sync")
    async with (
        NatsServer(folder / "nats", sync_interval=None) as server,
        fleet(server, folder, model=MODEL) as found,
    ):
        await found.start("both", SCRIPT, served_model=MODEL)
        yield server, found


async def without_a_loop(url: str, script: Callable[[SyncClient], T]) -> T:
    """What a script with a client returns that runs in a thread, as one without an event loop would."""

    def run() -> T:
        with SyncClient.connect(url, timeout=20) as client:
            return script(client)

    return await asyncio.to_thread(run)


async def test_an_answer_is_read_as_it_comes_whole_or_as_a_message(workers: tuple[NatsServer, Fleet]) -> None:
    def script(client: SyncClient) -> None:
        stream = client.chat(MODEL, HI, max_tokens=4, stream=True)
        chunks = list(stream)
        assert len(chunks) > 1
        assert (stream.status, stream.warnings) == ("ok", [])
        assert stream.usage is None or stream.usage.completion_tokens == 4
        said = "".join(each["choices"][0]["delta"].get("content") or "" for each in chunks if each["choices"])
        assert client.chat(MODEL, HI, max_tokens=4).message().content == said
        found = client.tokens(MODEL, [1, 2], max_tokens=3).message()
        assert (len(found.token_ids), found.finish_reason) == (3, "length")
        answer: Any = client.complete(MODEL, "a", max_tokens=2).answer()
        assert answer["usage"]["completion_tokens"] == 2
        assert client.detokenize(MODEL, client.tokenize(MODEL, "text").tokens).text == "text"
        assert client.models() == [MODEL]
        assert [each.model for each in client.workers()] == [MODEL]

    await without_a_loop(workers[0].url, script)


async def test_a_job_is_submitted_found_streamed_and_its_result_read(
    workers: tuple[NatsServer, Fleet],
) -> None:
    def script(client: SyncClient) -> None:
        job = client.submit("chat", MODEL, {"messages": HI, "max_tokens": 3}, job_id="sync-1")
        result = client.result(job)
        assert result.status == "ok"
        assert client.find("sync-1").id == job.id
        assert client.stream("sync-1").message().content == client.stream(job).message().content
        with pytest.raises(JobNotFound):
            client.find("never")

    await without_a_loop(workers[0].url, script)


async def test_a_stream_that_is_left_early_is_cancelled(workers: tuple[NatsServer, Fleet]) -> None:
    def script(client: SyncClient) -> None:
        for _ in client.tokens(MODEL, [1], user="endless"):
            break
        with client.tokens(MODEL, [1], user="endless") as stream:
            events: Iterator[Any] = iter(stream)
            next(events)
        asked = client.tokens(MODEL, [1], user="endless")
        next(iter(asked))
        asked.cancel()

    await without_a_loop(workers[0].url, script)
    await workers[1].idle()


async def test_a_job_is_cancelled_by_its_id(workers: tuple[NatsServer, Fleet]) -> None:
    def script(client: SyncClient) -> None:
        job = client.submit("tokens", MODEL, {"token_ids": [1], "user": "endless"})
        next(iter(client.stream(job)))
        client.cancel(job)
        with pytest.raises(Cancelled):
            client.result(job)

    await without_a_loop(workers[0].url, script)


async def test_threads_may_share_a_client(workers: tuple[NatsServer, Fleet]) -> None:
    def script(client: SyncClient) -> list[int]:
        lengths: list[int] = []

        def ask(length: int) -> None:
            lengths.append(len(client.tokens(MODEL, [1], max_tokens=length).message().token_ids))

        threads = [threading.Thread(target=ask, args=(length,)) for length in range(1, 7)]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
        return sorted(lengths)

    assert await without_a_loop(workers[0].url, script) == [1, 2, 3, 4, 5, 6]


async def test_errors_are_raised_where_the_script_waits(workers: tuple[NatsServer, Fleet]) -> None:
    def script(client: SyncClient) -> None:
        with pytest.raises(NoWorker):
            client.chat("other", HI).answer()
        with pytest.raises(CallerError):
            client.embeddings(MODEL, "a")
        client.close()

    await without_a_loop(workers[0].url, script)


async def test_a_client_that_cannot_connect_leaves_no_thread() -> None:
    def alone() -> None:
        with pytest.raises(BusUnavailable):
            SyncClient.connect("nats://127.0.0.1:9")

    await asyncio.to_thread(alone)
    await eventually(lambda: all(each.name != "inferbus-client" for each in threading.enumerate()))
