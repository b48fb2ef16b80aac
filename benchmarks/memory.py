"""What many requests leave behind in a worker: its memory as they pass, and what is still open at the end.

Scripted engines, so that every byte is the worker's own. The requests are of every kind and end in every
way: answered, whole or in chunks, one choice or several; refused; failed in the engine; cancelled; left by a
caller that breaks off, and by one whose connection is gone; durable jobs, answered, refused and cancelled.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import msgspec
from rich.console import Console

from benchmarks import machine, report
from benchmarks.load import LoadFailed, encode
from benchmarks.report import Aim, Report
from inferbus.schemas.errors import (
    Cancelled,
    EngineFailed,
    InferbusError,
    InvalidRequest,
    PrefillFailed,
    UndecodableBody,
)
from inferbus.schemas.fleet import Role, WorkerInfo
from inferbus.schemas.subjects import Subjects
from inferbus.workers.client import Client
from inferbus.workers.stack.local import LocalStack

MODEL: Final = "scripted"
CONCURRENCY: Final = 32
SETTLED: Final = 10_000
"""Requests before memory must have stopped growing: the bus remembers 4,096 subjects and 4,096 header blocks,
and one request in five is a durable job, which has two header blocks of its own."""
WANTED_BYTES: Final = 128.0
"""A request, beyond that: less than any object that a request could leave behind together with its name."""
IDLE_SECONDS: Final = 30.0
ANNOUNCE_SECONDS: Final = 0.5
ANSWER: Final = 24
"""Tokens of an answer."""

_ENV: Final = {"INFERBUS_ANNOUNCE_INTERVAL": str(ANNOUNCE_SECONDS)}
_LAYOUTS: Final[dict[str, tuple[Role, ...]]] = {"both": ("both",), "pair": ("prefill", "decode")}
_SCRIPT: Final = f"""
[[rules]]
user = "slow"
length = 30000
delay = 0.002
[[rules]]
user = "fails"
length = {ANSWER}
[rules.fault]
at = 3
[[rules]]
count = [97, 123]
length = {ANSWER}
"""


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """A worker's memory after some requests, once all of them have ended."""

    layout: str
    role: str
    requests: int
    resident: int
    anonymous: int


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One worker.

    Attributes:
        layout: `both` or `pair`.
        role: Its own.
        requests: That passed.
        start: Anonymous memory before the first one, in bytes.
        settled: After `SETTLED` requests, or half of them in a quick run.
        after: At the end.
        per_request: Bytes that each request in between left.
        busy: Slots in use at the end, by the registry.
        running: Requests in the engine at the end, by the registry.
    """

    layout: str
    role: str
    requests: int
    start: int
    settled: int
    after: int
    per_request: float
    busy: int
    running: int


async def measure(console: Console, *, quick: bool) -> Report:
    """10,000 requests to each layout, after as many that fill caches."""
    return await _measure(console, "memory", total=2_000 if quick else SETTLED + 10_000, quick=quick)


async def endurance(console: Console, *, quick: bool) -> Report:
    """100,000 requests to each layout."""
    return await _measure(console, "endurance", total=2_000 if quick else 100_000, quick=quick)


async def _measure(console: Console, name: str, *, total: int, quick: bool) -> Report:
    taken, load_before, started = report.now(), machine.load(), time.monotonic()
    samples: list[Sample] = []
    rows: list[Row] = []
    ways: dict[str, dict[str, int]] = {}
    for layout in _LAYOUTS:
        run = _Run(console, layout)
        await run(total)
        samples += run.samples
        rows += run.rows
        ways[layout] = dict(run.ways)
    return Report(
        name=name,
        quick=quick,
        taken=taken,
        seconds=round(time.monotonic() - started, 1),
        versions=machine.versions(),
        machine=machine.Machine.here(),
        load_before=load_before,
        setup={"concurrency": CONCURRENCY, "settled": SETTLED, "answer": ANSWER, "requests": ways},
        summary=rows,
        aims=list(_aims(rows)),
        readings=samples,
    )


def show(console: Console, found: Report) -> None:
    """Prints the table."""
    rows = [row for row in found.summary if isinstance(row, Row)]
    lines = [
        (
            f"{row.role} ({row.layout})",
            f"{row.requests:,}",
            _mib(row.start),
            _mib(row.settled),
            _mib(row.after),
            f"{row.per_request:+.0f}",
            f"{row.busy}+{row.running}",
        )
        for row in rows
    ]
    columns = (
        "worker",
        "requests",
        "MiB at first",
        "settled",
        "at the end",
        "B/request",
        "busy",
    )
    console.print(report.table(f"{found.name}: anonymous memory of workers", columns, lines))


class _Run:
    """One layout: its workers, and all that is asked of them."""

    def __init__(self, console: Console, layout: str) -> None:
        self._console = console
        self._layout = layout
        self.samples: list[Sample] = []
        self.rows: list[Row] = []
        self.ways: Counter[str] = Counter()

    async def __call__(self, total: int) -> None:
        with tempfile.TemporaryDirectory(prefix="inferbus-bench-") as folder:
            script = report.write(Path(folder, "script.toml"), _SCRIPT)
            roles = _LAYOUTS[self._layout]
            async with (
                LocalStack("", model=MODEL, roles=roles, scripted=script, env=_ENV) as stack,
                Client.connect(stack.url, owner="bench", timeout=IDLE_SECONDS) as client,
            ):
                requests = _Requests(client, stack.url)
                self._sample(stack, 0)
                step = 1_000 if total <= 2 * SETTLED else 5_000
                for done in range(0, total, step):
                    await self._some(requests, range(done, done + step))
                    workers = await _idle(client)
                    self._sample(stack, done + step)
                    self._console.print(f"{self._layout}: {done + step:,} requests", style="dim")
                self._conclude(workers, total)

    async def _some(self, requests: _Requests, numbers: range) -> None:
        left = iter(numbers)

        async def one_after_another() -> None:
            for number in left:
                way = requests.ways[number % len(requests.ways)]
                try:
                    async with asyncio.timeout(IDLE_SECONDS):
                        await way()
                except (InferbusError, TimeoutError) as error:
                    raise LoadFailed(f"request {number}, {way.__name__}: {error!r}") from error
                self.ways[way.__name__] += 1

        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(CONCURRENCY):
                    group.create_task(one_after_another())
        except* LoadFailed as failures:
            raise failures.exceptions[0] from None

    def _sample(self, stack: LocalStack, requests: int) -> None:
        for name, child in stack.workers.items():
            now = machine.memory(child.pid)
            self.samples.append(
                Sample(
                    layout=self._layout,
                    role=name.partition("-")[0],
                    requests=requests,
                    resident=now.resident,
                    anonymous=now.anonymous,
                )
            )

    def _conclude(self, workers: list[WorkerInfo], total: int) -> None:
        for role in _LAYOUTS[self._layout]:
            found = {each.requests: each.anonymous for each in self.samples if each.role == role}
            load = next(each.load for each in workers if each.role == role)
            self.rows.append(
                Row(
                    layout=self._layout,
                    role=role,
                    requests=total,
                    start=found[0],
                    settled=found[_settled(found)],
                    after=found[total],
                    per_request=(found[total] - found[_settled(found)]) / (total - _settled(found)),
                    busy=load.busy,
                    running=load.running,
                )
            )


class _Requests:
    """Requests of every kind; each method is one, from its beginning to its end."""

    def __init__(self, client: Client, url: str) -> None:
        self._client = client
        self._address = urlsplit(url)
        self._subjects = Subjects()
        self._gone = 0
        # Twenty, so that each is five in a hundred, or a multiple of that.
        self.ways: list[Callable[[], Awaitable[None]]] = [
            self.tokens,
            self.cancelled,
            self.chat,
            self.gone,
            self.job,
            self.tokens,
            self.undecodable,
            self.choices,
            self.left,
            self.chat,
            self.failed,
            self.tokens,
            self.gone,
            self.whole,
            self.refused,
            self.cancelled,
            self.job,
            self.completion,
            self.refused_job,
            self.cancelled_job,
        ]

    async def tokens(self) -> None:
        """Answered in chunks of tokens."""
        stream = self._client.tokens(MODEL, [1, 2, 3])
        await stream.answer()
        _check(stream.usage is not None and stream.usage.completion_tokens == ANSWER, "a whole answer")

    async def chat(self) -> None:
        """Answered in chunks of text."""
        async for _ in self._client.chat(MODEL, _MESSAGES):
            pass

    async def whole(self) -> None:
        """Answered in one piece."""
        await self._client.chat(MODEL, _MESSAGES, stream=False).answer()

    async def completion(self) -> None:
        """A text completion."""
        await self._client.complete(MODEL, "Once upon a time").answer()

    async def choices(self) -> None:
        """Three choices."""
        await self._client.chat(MODEL, _MESSAGES, n=3).answer()

    async def undecodable(self) -> None:
        """No JSON."""
        subject = self._subjects.request(MODEL, "chat")
        answer = await self._client.bus.request(subject, b'{"messages":')
        code = msgspec.json.decode(answer.data)["error"]["code"]
        _check(code == UndecodableBody.code, "an undecodable body's error")

    async def refused(self) -> None:
        """JSON that is no request."""
        await _expect(self._client.chat(MODEL, [], stream=False).answer(), InvalidRequest)

    async def failed(self) -> None:
        """An error of the engine: after some chunks, or of the prefill engine where there is one."""
        await _expect(self._client.tokens(MODEL, [1], user="fails").answer(), EngineFailed, PrefillFailed)

    async def cancelled(self) -> None:
        """Cancelled while it streams."""
        stream = self._client.tokens(MODEL, [1], user="slow")
        async for chunk in stream:
            if chunk.seq == 2:
                await stream.cancel()
        _check(stream.status == "cancelled", "the end of a cancelled stream")

    async def left(self) -> None:
        """Broken off by its caller."""
        async with self._client.chat(MODEL, _MESSAGES, user="slow") as stream:
            async for _ in stream:
                break

    async def gone(self) -> None:
        """A caller whose connection ends without a word."""
        self._gone += 1
        inbox = f"_INBOX.gone.{self._gone}".encode()
        body = encode({"token_ids": [1], "user": "slow"})
        subject = self._subjects.request(MODEL, "tokens").encode()
        reader, writer = await asyncio.open_connection(self._address.hostname, self._address.port)
        try:
            writer.write(b'CONNECT {"verbose":false,"headers":true}\r\nSUB %b 1\r\n' % inbox)
            writer.write(b"PUB %b %b %d\r\n%b\r\n" % (subject, inbox, len(body), body))
            while not (await reader.readline()).startswith((b"MSG", b"HMSG")):
                pass
        finally:
            writer.transport.abort()
            with suppress(ConnectionError):
                await writer.wait_closed()

    async def job(self) -> None:
        """A durable job, and its result."""
        job = await self._client.submit("tokens", MODEL, {"token_ids": [1]})
        await self._client.result(job)

    async def refused_job(self) -> None:
        """A durable job that is no request."""
        job = await self._client.submit("tokens", MODEL, {"token_ids": []})
        await _expect(self._client.result(job), InvalidRequest)

    async def cancelled_job(self) -> None:
        """A durable job that is cancelled while it runs."""
        job = await self._client.submit("tokens", MODEL, {"token_ids": [1], "user": "slow"})
        async for _ in (stream := self._client.stream(job)):
            break
        await stream.aclose()
        await self._client.cancel(job)
        await _expect(self._client.result(job), Cancelled)


_MESSAGES: Final[list[dict[str, Any]]] = [{"role": "user", "content": "What is the capital of France?"}]


async def _expect(work: Awaitable[object], *errors: type[InferbusError]) -> None:
    with suppress(*errors):
        await work
        raise LoadFailed(f"an answer came where one of {[each.__name__ for each in errors]} was due")


def _check(held: bool, what: str) -> None:
    if not held:
        raise LoadFailed(f"not as it should be: {what}")


async def _idle(client: Client) -> list[WorkerInfo]:
    """Waits until the registry shows nothing under way; after a while, returns what it shows.

    Every look comes after another announcement, so that none is older than the last request.
    """
    deadline = time.monotonic() + IDLE_SECONDS
    while True:
        await asyncio.sleep(2 * ANNOUNCE_SECONDS)
        workers = await client.workers()
        if all(each.load.busy == each.load.running == 0 for each in workers) or time.monotonic() > deadline:
            return workers


def _settled(found: dict[int, int]) -> int:
    """Where counting begins; in a quick run, which ends before that, in the middle."""
    return min(SETTLED, sorted(found)[len(found) // 2])


def _aims(rows: list[Row]) -> Iterator[Aim]:
    for row in rows:
        yield Aim(
            what=f"growth of the {row.role} worker ({row.layout})",
            wanted=f"at most {WANTED_BYTES:g} bytes a request",
            found=f"{row.per_request:+.0f} bytes",
            met=row.per_request <= WANTED_BYTES,
        )
        yield Aim(
            what=f"left behind in the {row.role} worker ({row.layout})",
            wanted="0 busy, 0 running",
            found=f"{row.busy} busy, {row.running} running",
            met=row.busy == row.running == 0,
        )


def _mib(size: int) -> str:
    return f"{size / 1024 / 1024:.1f}"
