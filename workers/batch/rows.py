"""Batches from Python: rows in, lines out, over the same files and the same run as the command's."""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import itertools
import queue
import tempfile
from collections.abc import AsyncIterator, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import msgspec

from inferbus.schemas.errors import InvalidRequest
from inferbus.schemas.subjects import Kind
from inferbus.workers.batch import tables
from inferbus.workers.batch.lines import URLS
from inferbus.workers.batch.output import whole_lines
from inferbus.workers.batch.runs import Begun, Options, begin, run
from inferbus.workers.batch.state import Batches, Record
from inferbus.workers.batch.tables import Frame
from inferbus.workers.batch.template import Filling, Template
from inferbus.workers.client.client import Client
from inferbus.workers.config import BusSettings

_LINE: Final = {"custom_id", "url", "body"}

AnyRows = Iterable[Mapping[str, Any]] | Frame | str | Path
"""Lines, bodies, rows of a table, a table, or the path of a file."""


class Rows:
    """One call of `Client.batch`; see there.

    Args:
        client: Connected.
        rows: Lines, bodies, a frame, or a path.
        output: The output file; None: nothing is kept.
        model: For all requests.
        kind: Of rows that are bodies.
        template: What is made of rows that are neither; None: nothing.
        deadline: Seconds that a request may take.
        skip_invalid: Rows that cannot be run have a line with an error.
        ordered: Yield in the order of the rows.
    """

    def __init__(
        self,
        client: Client,
        rows: AnyRows,
        *,
        output: str | Path | None,
        model: str | None,
        kind: Kind,
        template: Template | None,
        deadline: float | None,
        skip_invalid: bool,
        ordered: bool,
        reorder: bool,
    ) -> None:
        self._client = client
        self._rows = rows
        self._output = output
        self._model = model
        self._kind = kind
        self._template = template
        self._deadline = deadline
        self._skip_invalid = skip_invalid
        self._ordered = ordered
        self._reorder = reorder

    async def lines(self) -> AsyncIterator[dict[str, Any]]:
        """Runs the batch, and yields its lines."""
        with contextlib.ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="inferbus-batch-")))
            output = folder / "output.jsonl" if self._output is None else Path(self._output)
            source = await asyncio.to_thread(self._source, output)
            options = Options(
                output=output,
                model=self._model,
                deadline=self._deadline,
                skip_invalid=self._skip_invalid,
                ordered=self._ordered,
                reorder=self._reorder,
                template=self._template if isinstance(self._rows, str | Path) else None,
            )
            begun = await begin(self._client, source, options)
            try:
                async for line in self._run(begun):
                    yield line
            finally:
                if self._output is None:
                    await Batches(self._client.bus, self._client.owner).remove(begun.kept.record)

    async def _run(self, begun: Begun) -> AsyncIterator[dict[str, Any]]:
        record = begun.kept.record
        for line in [] if self._ordered else await asyncio.to_thread(_earlier, record):
            yield line
        arrived: asyncio.Queue[bytes | None] = asyncio.Queue()

        def written(lines: list[bytes]) -> None:
            if not self._ordered:
                for line in lines:
                    arrived.put_nowait(line)

        running = asyncio.create_task(run(self._client, begun, written=written))
        running.add_done_callback(lambda _: arrived.put_nowait(None))
        try:
            while (raw := await arrived.get()) is not None:
                yield msgspec.json.decode(raw)
            record = await running
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
        if self._ordered:
            # Both files are in that order.
            for line in heapq.merge(*map(_read, _files(record)), key=row_number):
                yield line

    def _source(self, output: Path) -> Path:
        """The rows as a batch file beside the output."""
        if isinstance(self._rows, str | Path):
            return Path(self._rows)
        lines = self._lines(self._rows)
        path = output.with_name(f"{output.name}.input.jsonl")
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("wb") as file:
            for line in lines:
                file.write(line + b"\n")
        return path

    def _lines(self, rows: Iterable[Mapping[str, Any]] | Frame) -> Iterator[bytes]:
        template = self._template
        if template is not None:
            columns = template.columns
            if isinstance(rows, Frame):
                cells: Iterable[Sequence[Any]] = tables.frame_rows(rows, columns)
            else:
                cells = ([row.get(name, msgspec.UNSET) for name in columns] for row in rows)
            filling = Filling(template, columns)
            yield from itertools.starmap(filling.line, enumerate(cells, 1))
            return
        if isinstance(rows, Frame):
            names = tables.listed(tables.frame_names(rows))
            raise InvalidRequest(f"a table needs `map`, the prompt's column for example; it has {names}")
        encoder = msgspec.json.Encoder()
        for number, row in enumerate(rows):
            try:
                yield encoder.encode(self._line(number, row))
            except (TypeError, ValueError, OverflowError, RecursionError) as error:
                raise InvalidRequest(f"row {number} cannot be sent as JSON: {error}") from None

    def _line(self, number: int, row: Mapping[str, Any]) -> dict[str, Any]:
        if row.keys() >= _LINE:
            return dict(row)
        return {"custom_id": str(number), "method": "POST", "url": URLS[self._kind], "body": dict(row)}


def batch(
    rows: AnyRows,
    *,
    url: str | BusSettings = BusSettings(),  # noqa: B008 - frozen
    owner: str = "default",
    **options: Any,
) -> Generator[dict[str, Any], None, None]:
    """`Client.batch` for programs without an event loop: yields the lines as they come.

    Args:
        rows: See `Client.batch`.
        url: Of NATS, or settings.
        owner: Whose the batch is.
        options: See `Client.batch`.

    Raises:
        InferbusError: See `Client.batch`; also that NATS cannot be reached.
    """
    lines: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
    loop = asyncio.new_event_loop()

    async def work() -> None:
        async with Client.connect(url, owner=owner) as client:
            async for line in client.batch(rows, **options):
                lines.put(line)

    # On a thread of its own: the batch goes on while the program works on a line.
    with ThreadPoolExecutor(1, thread_name_prefix="inferbus-batch") as thread:
        task = loop.create_task(work())
        running = thread.submit(_run, loop, task)
        running.add_done_callback(lambda _: lines.put(None))
        try:
            while (line := lines.get()) is not None:
                yield line
            running.result()
        finally:
            if not running.done():
                loop.call_soon_threadsafe(task.cancel)


def _run(loop: asyncio.AbstractEventLoop, task: asyncio.Task[None]) -> None:
    asyncio.set_event_loop(loop)
    try:
        with contextlib.suppress(asyncio.CancelledError):
            loop.run_until_complete(task)
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.run_until_complete(loop.shutdown_default_executor())
    finally:
        loop.close()


def _earlier(record: Record) -> list[dict[str, Any]]:
    """Lines that the files of a batch hold."""
    return [line for path in _files(record) for line in _read(path)]


def _files(record: Record) -> tuple[Path, Path]:
    return Path(record.output), Path(record.errors)


def _read(path: Path) -> Iterator[dict[str, Any]]:
    yield from map(msgspec.json.decode, whole_lines(path))


def row_number(line: dict[str, Any]) -> int:
    """Of which line of the input, counted from 1, a line of the output or error file is."""
    return int(line["id"].rpartition("_")[2])
