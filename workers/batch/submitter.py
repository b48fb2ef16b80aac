"""Runs a batch: submits its lines, collects their answers, writes them, forgets them.

    lines ─▶ bundles ─▶ INFER_JOBS ─▶ workers ─▶ INFER_RESULTS ─▶ output file, synced ─▶ result removed
                 ▲                        │
                 └── unstarted lines ─────┤
       alone ◀── lines that failed ───────┘

The output files alone say which lines are done. What NATS holds is found again by the jobs' numbers, which
the record reserves before they are used.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import socket
import time
from collections.abc import Callable, Coroutine, Iterable, Iterator
from pathlib import Path
from typing import Any, Final

import msgspec
import structlog

from inferbus.schemas import codec, headers
from inferbus.schemas.bundles import CONTENT_TYPE, Bundle, BundleAnswer
from inferbus.schemas.errors import BusUnavailable, ErrorBody, InferbusError, Overloaded, PayloadTooLarge
from inferbus.schemas.objects import parse_object
from inferbus.schemas.requests import COMPLETION_TOKENS, bounds_tokens
from inferbus.workers.batch import bundling
from inferbus.workers.batch.bundling import Backlog, Pace
from inferbus.workers.batch.copies import SEGMENT, Copy, restore
from inferbus.workers.batch.errors import BatchHeld
from inferbus.workers.batch.grouping import grouped
from inferbus.workers.batch.lines import Expected, Line, Problem, Unusable, names_adapter, parse
from inferbus.workers.batch.output import Output, answer_line, error_line
from inferbus.workers.batch.reading import batch_file, numbered
from inferbus.workers.batch.state import Batches, Holder, Kept, Record, Status
from inferbus.workers.bus.connection.message import Message
from inferbus.workers.bus.errors import ApiError, NotPermitted, StreamFull
from inferbus.workers.bus.interface import Stored
from inferbus.workers.bus.jetstream import browse, layout
from inferbus.workers.bus.jetstream.client import JetStream
from inferbus.workers.bus.jetstream.objects import Objects
from inferbus.workers.bus.jetstream.removal import Removal
from inferbus.workers.client import reads
from inferbus.workers.client.client import Client
from inferbus.workers.client.jobs import Job, message_id, publish_cancel, publish_job
from inferbus.workers.client.requests import encode_body, request_body

log = structlog.get_logger()

LEASE: Final = 10.0
"""Seconds without a new record after which a batch on another machine is taken over."""

SAVED_EVERY: Final = 2.0
CANCEL_ASKED_EVERY: Final = 0.5
TICK: Final = 0.2
"""Seconds between two writings of the output, at most; each has a sync."""

COPIED_EVERY: Final = 1.0
"""Seconds between two segments of a shared batch's output, unless it grows faster than by one."""

SILENCE: Final = 5.0
LONGEST_SILENCE: Final = 60.0
"""Seconds without a word about a job after which its result is looked for; doubled up to the second."""

RESERVED: Final = 1024
"""Jobs whose numbers are reserved with one record."""

PARALLEL: Final = 32
"""Calls of the server under way at once."""

CANCEL_GRACE: Final = 5.0
"""Seconds for which answers to cancelled jobs are awaited: workers stop within one."""

CANCELLED_WITHIN: Final = 1.0
"""Seconds within which a worker stops what is cancelled."""

PAUSE: Final = 1.0
"""Seconds before the server is asked again where it is away or full."""


class Open(msgspec.Struct, kw_only=True):
    """A job that is submitted and not answered.

    Attributes:
        lines: That have not ended, by their numbers.
        alone: Whether it is a job of one line, not a bundle.
        suspect: Whether a worker has died of its lines before, or beside them.
        submission: Its stream sequence; None while it is being submitted.
        look: When its result is looked for, by the loop's clock.
        silence: Seconds between two looks.
    """

    lines: dict[int, Line]
    alone: bool
    suspect: bool = False
    submission: int | None = None
    look: float = 0.0
    silence: float = SILENCE


class _Usage(msgspec.Struct, gc=False):
    usage: dict[str, Any] | None = None


_usage: Final = msgspec.json.Decoder(_Usage)
_answer: Final = msgspec.json.Decoder(BundleAnswer)

Report = Callable[[Record, Pace, int], None]
"""Told now and then how the batch stands: its record, the pace, and the lines that are submitted."""


class Submitter:
    """Runs one batch to its end; several processes may try, and one of them does.

    Args:
        client: Connected; its owner is the batch's.
        kept: The batch's record.
        report: Told how it stands.
        written: Told of lines of either file, once they are synced.
        clock: Monotonic seconds.
    """

    def __init__(
        self,
        client: Client,
        kept: Kept,
        *,
        report: Report = lambda record, pace, submitted: None,
        written: Callable[[list[bytes]], None] = lambda lines: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.record = kept.record
        self._client = client
        self._bus = client.bus
        self._jetstream = JetStream(client.bus)
        self._batches = Batches(client.bus, client.owner)
        self._removal = Removal(client.bus, client.owner)
        self._sequence, self._found = kept.sequence, kept
        self._reconnects = client.bus.reconnects
        self._report = report
        self._on_written = written
        self._clock = clock
        self._holder = Holder(host=socket.gethostname(), pid=os.getpid(), token=secrets.token_hex(8))
        self._output = Output(Path(kept.record.output), Path(kept.record.errors))
        self._open: dict[str, Open] = {}
        self._in_flight = 0
        self._next = kept.record.reserved
        self._pace = Pace()
        self._arrived: asyncio.Queue[tuple[str, bytes | None]] = asyncio.Queue()
        # The same for every process that runs the batch, so that jobs of an earlier one answer to this one.
        self._replies = client.bus.private_subject(kept.record.replies)
        self._copies: dict[Path, Copy] = {}
        # Jobs whose lines are: to be written; written, and to be copied where the batch is shared; neither.
        self._taken: list[str] = []
        self._written: list[str] = []
        self._forgettable: list[str] = []
        self._saved = self._asked = self._copied = self._lost = -LEASE
        # Whether the server may have forgotten something, in this process's time or before.
        self._disturbed = kept.record.first < kept.record.reserved
        self._saving = asyncio.Lock()
        # Before that, the record says where an earlier process was.
        self._scanned = False
        self._problem: BaseException | None = None
        self._duplicates: frozenset[int] = frozenset()
        self._ending: Status | None = None
        self._recent: list[tuple[float, int]] = []

    async def run(self, duplicates: Iterable[int] = ()) -> Record:
        """Runs the batch until every line is done; returns its last record.

        Args:
            duplicates: Lines that repeat an id, and are no lines of the batch.

        Raises:
            BatchHeld: Another process runs it.
            OutputFailed: The output cannot be written; run it again once it can.
            BusUnavailable: The connection is closed for good.
        """
        self._duplicates = frozenset(duplicates)
        await asyncio.to_thread(self._output.open)
        self.record.counts, self.record.usage = self._output.counts, self._output.usage
        try:
            await self._take_lease()
            if self.record.shared:
                await self._share()
            self.record.host = socket.gethostname()
            subscription = await self._bus.subscribe(f"{self._replies}.*", self._on_reply)
            try:
                await self._work()
            finally:
                await subscription.unsubscribe()
        finally:
            self._output.close()
            with contextlib.suppress(InferbusError):
                await self._release()
        return self.record

    # The lease.

    async def _take_lease(self) -> None:
        holder, kept = self.record.holder, self._found
        if holder is not None and not holder.gone:
            await asyncio.sleep(LEASE)
            now = await self._batches.get(self.record.id)
            if now.sequence != kept.sequence:
                raise BatchHeld(f"the process {holder.pid} on {holder.host} runs this batch")
        self.record.holder = self._holder
        if self.record.status != "cancelling":
            self.record.enter("in_progress", time.time())
        await self._save()

    async def _save(self) -> None:
        """Stores the record, which renews the lease.

        Raises:
            BatchHeld: Another process has it now.
        """
        async with self._saving:
            await self._save_now()

    async def _save_now(self) -> None:
        record, output = self.record, self._output
        record.counts, record.usage = output.counts, output.usage
        if self._scanned:
            submissions = [each.submission for each in self._open.values() if each.submission]
            record.since = min(submissions, default=record.since)
            # Also what is written, and not removed from the server yet.
            left = [*self._open, *self._taken, *self._written, *self._forgettable]
            record.first = min(map(_number, left), default=self._next)
            names = record.copy_names
            record.copied = {names[str(path)]: copy.end for path, copy in self._copies.items()}
        record.rate = self._rate()
        began = self._clock()
        while True:
            try:
                self._sequence = await self._batches.save(record, self._sequence)
                break
            except BatchHeld:
                # Unless it is this process's own record, whose confirmation was lost.
                kept = await self._batches.find(record.id)
                if kept is None or kept.record.holder != self._holder or kept.sequence == self._sequence:
                    raise
                self._sequence = kept.sequence
            except BusUnavailable:
                if self._bus.closed.is_set():
                    raise
                await asyncio.sleep(PAUSE)
            began = self._clock()
        self._saved = began

    async def _release(self) -> None:
        if self.record.holder == self._holder and self._bus.connected:
            self.record.holder = None
            self._sequence = await self._batches.save(self.record, self._sequence)

    # The run.

    async def _work(self) -> None:
        lines = self._lines()
        backlog = Backlog(lines if self.record.as_read else grouped(lines))
        await self._find_ending()
        await self._find_submitted(backlog)
        self._scanned = True
        await self._look_at_workers()
        submitting: set[asyncio.Task[None]] = set()
        housekeeping = asyncio.create_task(self._keep_house())
        copying = asyncio.create_task(self._copy_input())
        try:
            while self._ending is None and (self._open or submitting or not backlog.empty):
                await self._submit(backlog, submitting)
                await self._collect(backlog, submitting)
                if housekeeping.done():
                    housekeeping.result()
                if self._problem is not None:
                    raise self._problem
            if self._ending is not None:
                await self._end_early(backlog, submitting)
            else:
                await copying
            await self._write()
            await self._sweep()
        finally:
            for task in (beside := [housekeeping, copying, *submitting]):
                task.cancel()
            await asyncio.gather(*beside, return_exceptions=True)
        await self._persistently(self._copy_output)
        await self._forget()
        await self._finish()

    async def _finish(self) -> None:
        ended: Status = "completed"
        if self._ending is not None:
            ended = self._ending
        self.record.enter("finalizing", time.time())
        await self._save()
        await asyncio.to_thread(self._output.finish, ordered=self.record.ordered)
        self.record.first, self.record.alone = self._next, {}
        self.record.enter(ended, time.time())
        await self._save()
        self._report(self.record, self._pace, 0)

    def _lines(self) -> Iterator[Line]:
        """The lines that are not done; those that cannot be run become error lines on the way."""
        record = self.record
        expected = Expected(kind=record.kind, model=record.model, any_model=record.any_model)
        left = record.source.lines
        done = self._output.done
        for number, data in numbered(Path(record.source.path), record.source.mapping, done=done.__contains__):
            if not left:
                return
            left -= 1
            if number in done:
                continue
            try:
                line = parse(number, data)
                expected.check(line)
                if number in self._duplicates:
                    problem = Problem(code="duplicate_custom_id", message="an earlier line has this id")
                    raise Unusable(problem, line.custom_id)
            except Unusable as error:
                self._fail(number, error.custom_id, None, _as_error(error.problem))
                continue
            # A copy of the body: as it is, it keeps the whole line.
            yield msgspec.structs.replace(line, body=msgspec.Raw(bytes(line.body)))

    async def _submit(self, backlog: Backlog, submitting: set[asyncio.Task[None]]) -> None:
        """Submits as much as the window has room for."""
        if backlog.suspects and not any(job.suspect for job in self._open.values()):
            lines = backlog.suspects.popleft()
            if len(lines) == 1:
                await self._submit_alone(lines, submitting, suspect=True)
            else:
                await self._submit_bundle(lines, submitting, suspect=True)
        alone: list[Line] = []
        while (
            backlog.alone
            and len(submitting) + len(alone) < PARALLEL
            and self._in_flight + len(alone) < self._pace.window
        ):
            alone.append(backlog.alone.popleft())
        if alone:
            await self._submit_alone(alone, submitting)
        while self._in_flight < self._pace.window and len(submitting) < PARALLEL:
            lines = backlog.bundle(self._pace.bundle)
            if not lines:
                return
            await self._submit_bundle(lines, submitting)

    async def _submit_bundle(
        self, lines: list[Line], submitting: set[asyncio.Task[None]], *, suspect: bool = False
    ) -> None:
        if self._next >= self.record.reserved:
            self.record.reserved = self._next + RESERVED
            await self._save()
        job = Open(lines={each.number: each for each in lines}, alone=False, suspect=suspect)
        self._start(self._name(), job, submitting)

    async def _submit_alone(
        self, lines: list[Line], submitting: set[asyncio.Task[None]], *, suspect: bool = False
    ) -> None:
        named = [(self._name(), line) for line in lines]
        self.record.alone = self.record.alone | {name: line.number for name, line in named}
        self.record.reserved = max(self.record.reserved, self._next)
        await self._save()
        for name, line in named:
            self._start(name, Open(lines={line.number: line}, alone=True, suspect=suspect), submitting)

    def _name(self) -> str:
        name = f"{self.record.id}-{self._next}"
        self._next += 1
        return name

    def _start(self, name: str, job: Open, submitting: set[asyncio.Task[None]]) -> None:
        self._open[name] = job
        self._in_flight += len(job.lines)
        task = asyncio.create_task(self._publish(name, job))
        submitting.add(task)
        task.add_done_callback(submitting.discard)
        task.add_done_callback(self._published)

    def _published(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled():
            self._problem = self._problem or task.exception()

    async def _publish(self, name: str, job: Open) -> None:
        """Stores a job; where the server is away or full, again and again under the same id."""
        record = self.record
        fields = {
            headers.JOB_ID: name,
            headers.REPLY_TO: f"{self._replies}.{name}",
            headers.CONTENT_TYPE: codec.JSON if job.alone else CONTENT_TYPE,
        }
        if record.deadline is not None:
            fields[headers.DEADLINE] = f"{record.deadline:g}"
        subject = self._bus.subjects.job(record.model, "batch", record.owner, record.kind)
        body = self._body(job)
        fields[headers.MSG_ID] = message_id(name, subject, fields[headers.CONTENT_TYPE], body)
        while self._ending is None:
            try:
                ack = await publish_job(self._bus, subject, body, fields)
            except PayloadTooLarge as error:
                self._refused(name, job, error)
                return
            except (Overloaded, BusUnavailable) as error:
                if self._bus.closed.is_set() or isinstance(error, NotPermitted):
                    raise
                log.debug("batch.not_submitted", reason=error.message)
                await asyncio.sleep(PAUSE)
            else:
                job.submission, job.look = ack.sequence, self._clock() + job.silence
                record.oldest = record.oldest or ack.sequence
                return

    def _body(self, job: Open) -> bytes:
        lines = [self._as_sent(line) for line in job.lines.values()]
        if not job.alone:
            return bundling.encode(lines)
        fields = msgspec.json.decode(lines[0].body)
        return encode_body(request_body(self.record.kind, fields, streamed=False), codec.JSON)

    def _as_sent(self, line: Line) -> Line:
        """The line as it is sent: with the batch's model, an adapter of it, or none, and OpenAI's default."""
        model, kind = self.record.model, self.record.kind
        as_it_is = line.model in (None, model) or names_adapter(line.model, model)
        change: dict[str, Any] = {} if as_it_is else {"model": model}
        if kind != "completions" and not change:
            return line
        fields = msgspec.json.decode(line.body)
        if kind == "completions" and not bounds_tokens(fields):
            change["max_tokens"] = COMPLETION_TOKENS
        if not change:
            return line
        return msgspec.structs.replace(line, body=msgspec.Raw(msgspec.json.encode(fields | change)))

    def _refused(self, name: str, job: Open, error: PayloadTooLarge) -> None:
        """A job is too large for the server: its lines are sent alone, or a line fails."""
        if len(job.lines) > 1:
            self._arrived.put_nowait((name, b""))
            return
        for line in job.lines.values():
            self._fail(line.number, line.custom_id, None, error.body())
        self._close(name)

    async def _collect(self, backlog: Backlog, submitting: set[asyncio.Task[None]]) -> None:
        """Takes the answers that have come, after waiting for one; then writes them."""
        waiting = asyncio.ensure_future(self._arrived.get())
        try:
            room = self._in_flight < self._pace.window and not backlog.empty
            conditions: set[asyncio.Future[Any]] = {waiting}
            if room or not self._open:
                conditions |= submitting
            await asyncio.wait(conditions, timeout=TICK, return_when=asyncio.FIRST_COMPLETED)
            if waiting.done():
                self._take(*waiting.result(), backlog)
        finally:
            waiting.cancel()
        while not self._arrived.empty():
            self._take(*self._arrived.get_nowait(), backlog)
        if self._output.waiting:
            await self._write()

    def _on_reply(self, message: Message) -> None:
        name = message.subject.rpartition(".")[2]
        job = self._open.get(name)
        if job is None:
            # A worker took it once more. What it has stored came after the first result's removal.
            if self._scanned and name not in {*self._taken, *self._written, *self._forgettable}:
                self._forgettable.append(name)
            return
        if job.alone or not message.data:
            # Its stored result has all of it.
            job.look = 0.0
        else:
            self._arrived.put_nowait((name, message.data))

    def _take(self, name: str, data: bytes | None, backlog: Backlog) -> None:
        """The result of a job, of a bundle or of one line; None: the server has lost the job."""
        job = self._open.get(name)
        if job is None:
            return
        if data is None:
            (backlog.alone if job.alone else backlog.again).extend(job.lines.values())
        elif job.alone:
            (line,) = job.lines.values()
            self._take_one(name, line, data)
        elif not self._take_bundle(name, job, data, backlog):
            return
        if job.alone:
            self.record.alone = {key: value for key, value in self.record.alone.items() if key != name}
        self._taken.append(name)
        self._close(name)

    def _take_one(self, name: str, line: Line, data: bytes) -> None:
        try:
            failed = codec.decode(data, _Failed)
        except InferbusError:
            failed = _Failed()
        if failed.error is None:
            self._succeed(line, name, data)
        else:
            self._fail(line.number, line.custom_id, name, failed.error)

    def _take_bundle(self, name: str, job: Open, data: bytes, backlog: Backlog) -> bool:
        """Takes what has ended of a bundle; False: the rest of it still runs."""
        answer = BundleAnswer(job=name, attempt=1, answers=[])
        # Where it is something else, the workers do not know bundles, and the lines are sent alone.
        with contextlib.suppress(msgspec.DecodeError):
            answer = _answer.decode(data)
        left, before = job.lines, len(job.lines)
        for answered in answer.answers:
            if (line := left.pop(answered.id, None)) is not None:
                self._succeed(line, name, bytes(answered.answer))
        for ended in answer.errors:
            if (line := left.pop(ended.id, None)) is not None:
                self._fail(line.number, line.custom_id, name, ended.error)
        self._in_flight -= before - len(left)
        if answer.partial:
            job.look = self._clock() + job.silence
            return False
        unstarted = set(answer.unstarted)
        backlog.again.extend(line for number, line in left.items() if number in unstarted)
        failed = [line for number, line in left.items() if number not in unstarted]
        if failed and answer.died:
            backlog.died(failed, suspect=job.suspect)
        else:
            backlog.alone.extend(failed)
        return True

    def _succeed(self, line: Line, name: str, answer: bytes) -> None:
        written = answer_line(self.record.id, line.number, line.custom_id, name, answer)
        self._output.answered(line.number, written, _usage.decode(answer).usage)

    def _fail(self, number: int, custom_id: str | None, name: str | None, error: ErrorBody | str) -> None:
        if self._ending is not None and not isinstance(error, str) and error.code == "cancelled":
            error = _CODES[self._ending]
        written = error_line(self.record.id, number, custom_id, name, error)
        self._output.failed(number, written, error if isinstance(error, str) else None)

    def _close(self, name: str) -> None:
        job = self._open.pop(name, None)
        if job is not None:
            self._in_flight -= len(job.lines)

    async def _write(self) -> None:
        """Writes and syncs; only then are the results removed from the server."""
        await self._keep_lease()
        taken, lines = len(self._taken), self._output.take()
        await asyncio.to_thread(self._output.write, lines)
        for path, copy in self._copies.items():
            for line in lines[path]:
                copy.add(line)
        # Before they are told: whoever hears of them may end this process.
        (self._written if self._copies else self._forgettable).extend(self._taken[:taken])
        del self._taken[:taken]
        self._on_written([line for each in lines.values() for line in each])
        self._recent = [*self._recent[-50:], (self._clock(), self._output.done.count)]
        self._report(self.record, self._pace, self._in_flight)

    async def _forget(self) -> None:
        """Removes the results of jobs whose lines are written."""
        names = list(self._forgettable)
        try:
            await _bounded(self._removal.remove(name, "result") for name in names)
        except NotPermitted as error:
            # They stay until they are too old.
            log.warning("batch.results_not_removed", reason=error.message, count=len(names))
        except BusUnavailable as error:
            # Once more with the next ones; removing one twice does no harm.
            log.debug("batch.server_away", reason=error.message)
            return
        # New ones were added at its end meanwhile.
        del self._forgettable[: len(names)]

    # Beside the run.

    async def _keep_house(self) -> None:
        """Renews the lease, follows the workers, looks for what nobody told of."""
        while True:
            await asyncio.sleep(TICK)
            try:
                await self._keep_house_once()
            except BatchHeld:
                raise
            except BusUnavailable as error:
                if self._bus.closed.is_set():
                    raise
                log.debug("batch.server_away", reason=error.message)

    async def _keep_house_once(self) -> None:
        if self._clock() - self._asked >= CANCEL_ASKED_EVERY:
            self._asked = self._clock()
            await self._find_ending()
        if self._clock() - self._saved >= SAVED_EVERY:
            await self._look_at_workers()
            await self._save()
        await self._look_for_results()
        if self._clock() - self._copied >= COPIED_EVERY or self._uncopied >= SEGMENT:
            await self._copy_output()
        await self._forget()

    async def _find_ending(self) -> None:
        """Whether it is to be cancelled, or has expired; the first of these counts."""
        window, created = self.record.window, self.record.stamps["created_at"]
        if self._ending is None and await self._batches.cancel_asked(self.record.id):
            self._ending = "cancelled"
        if self._ending is None and window is not None and time.time() > created + window:
            self._ending = "expired"

    async def _look_at_workers(self) -> None:
        with contextlib.suppress(BusUnavailable):
            self._pace = bundling.pace(await self._client.workers(), self.record.model)

    async def _look_for_results(self) -> None:
        """Reads the results of jobs that nobody told of for long, and sends again what the server lost."""
        now = self._clock()
        silent = [
            (name, job) for name, job in self._open.items() if job.submission is not None and job.look <= now
        ]
        for _, job in silent:
            job.look, job.silence = now + job.silence, min(2 * job.silence, LONGEST_SILENCE)
        await _bounded(self._look(name, job) for name, job in silent)

    async def _look(self, name: str, job: Open) -> None:
        data = await self._result(name)
        if data is None and (job.silence <= 2 * SILENCE or await self._queued(name, job)):
            return
        # It may have ended between the two looks.
        data = data or await self._result(name)
        if data is None:
            log.warning("batch.job_lost", job=name)
            # A worker may run it all the same.
            await self._cancel(name)
            self._lost, self._disturbed = self._clock(), True
        self._arrived.put_nowait((name, data))

    async def _result(self, name: str) -> bytes | None:
        subject = self._bus.subjects.result(self.record.owner, name)
        stored = await self._jetstream.last(layout.RESULTS, subject)
        if stored is None:
            return None
        apart = parse_object(stored.headers)
        return stored.data if apart is None else await Objects(self._bus).fetch(self.record.owner, apart)

    async def _queued(self, name: str, job: Open) -> bool:
        """Whether the server still has a job; also where that cannot be told."""
        assert job.submission is not None
        try:
            return await self._jetstream.get(layout.JOBS, {"seq": job.submission}) is not None
        except NotPermitted:
            with contextlib.suppress(BusUnavailable):
                return bool(await reads.submissions(self._bus, self.record.owner, name, job.submission))
            return True
        except ApiError as error:
            return error.status != 404

    def _rate(self) -> float:
        if len(self._recent) < 2:
            return 0.0
        (first, before), (last, after) = self._recent[0], self._recent[-1]
        return (after - before) / (last - first) if last > first else 0.0

    # The copies of a shared batch.

    @property
    def _uncopied(self) -> int:
        return max((copy.waiting for copy in self._copies.values()), default=0)

    async def _share(self) -> None:
        """Brings the output here and its copies to one state: after another machine, that of the copies."""
        record, output = self.record, self._output
        for named, name in record.copy_names.items():
            known = record.copied.get(name, 0)
            copy = Copy(self._bus, record.owner, record.id, name, known=known)
            await copy.find_end()
            self._copies[Path(named)] = copy
        if not record.here or any(copy.end > output.size(path) for path, copy in self._copies.items()):
            output.close()
            for path, copy in self._copies.items():
                restored = path.with_name(f"{path.name}.restored")
                await restore(copy, restored, self._keep_lease)
                await asyncio.to_thread(output.replace, path, restored)
            await asyncio.to_thread(output.open)
        for path, copy in self._copies.items():
            while (size := output.size(path) - copy.end) > 0:
                copy.add(output.read(path, copy.end, min(size, SEGMENT)))
                await copy.store()
                await self._keep_lease()

    async def _keep_lease(self) -> None:
        """Renews the lease where it is half over: then it may be another's by now, who writes as well."""
        if self._clock() - self._saved > LEASE / 2:
            await self._save()

    async def _copy_output(self) -> None:
        """Copies what is written; only then are the results removed from the server."""
        self._copied, written = self._clock(), len(self._written)
        try:
            for copy in self._copies.values():
                await copy.store()
        except StreamFull as error:
            await self._unshare(error)
        self._forgettable += self._written[:written]
        del self._written[:written]

    async def _copy_input(self) -> None:
        """Copies the input as a batch file, unless it has been copied as a whole."""
        record = self.record
        if not record.shared or record.input_file or record.input_copied == record.source.digest:
            return
        copy = Copy(self._bus, record.owner, record.id, record.input_name)
        pieces = batch_file(Path(record.source.path), record.source.mapping, await copy.find_end())
        while record.shared and (data := await asyncio.to_thread(next, pieces, b"")):
            copy.add(data)
            await self._persistently(copy.store)
        if record.shared:
            record.input_copied = record.source.digest
            await self._save()

    async def _persistently(self, store: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Stores, once the server is there."""
        while True:
            try:
                return await store()
            except StreamFull as error:
                return await self._unshare(error)
            except BusUnavailable as error:
                if self._bus.closed.is_set() or isinstance(error, NotPermitted):
                    raise
                await asyncio.sleep(PAUSE)

    async def _unshare(self, error: StreamFull) -> None:
        """Without room for its copies the batch goes on here."""
        log.warning("batch.not_shared", batch=self.record.id, reason=error.message)
        self.record.shared = False
        self._copies.clear()
        with contextlib.suppress(BusUnavailable):
            await self._batches.remove_files(self.record.id)

    # After another process.

    async def _find_submitted(self, backlog: Backlog) -> None:
        """Finds the jobs that an earlier process submitted: queued, running, or answered."""
        record = self.record
        if record.first >= record.reserved:
            return
        queued = await self._queued_jobs(record.since)
        names = [f"{record.id}-{number}" for number in range(record.first, record.reserved)]
        results: dict[str, bytes] = {}

        async def read(name: str) -> None:
            if (data := await self._result(name)) is not None:
                results[name] = data

        # After the queue: a job that ended meanwhile is in one of them.
        await _bounded(read(name) for name in names)
        claims: dict[int, str] = {}
        for name in queued.keys() | results.keys():
            claims |= dict.fromkeys(self._numbers(name, queued.get(name), results.get(name)), name)
        claims = {number: name for number, name in claims.items() if number not in self._output.done}
        left = len(claims)
        while left and (lines := backlog.bundle(1)):
            (line,) = lines
            claimed = claims.get(line.number)
            if claimed is None:
                backlog.again_later(line)
                continue
            left -= 1
            message = queued.get(claimed)
            job = self._open.setdefault(
                claimed,
                Open(
                    lines={},
                    alone=claimed in record.alone,
                    submission=message.sequence if message else 0,
                    look=self._clock() + SILENCE / 2,
                ),
            )
            job.lines[line.number] = line
            self._in_flight += 1
        backlog.restore()
        for name in queued.keys() - self._open.keys() - results.keys():
            # All of its lines are done; its result is still to be removed.
            sequence = queued[name].sequence
            self._open[name] = Open(lines={}, alone=False, submission=sequence, look=self._clock() + SILENCE)
        for name, data in results.items():
            if name in self._open:
                self._arrived.put_nowait((name, data))
            else:
                self._taken.append(name)

    async def _queued_jobs(self, first: int) -> dict[str, Stored]:
        record, found = self.record, dict[str, Stored]()
        subject = self._bus.subjects.job(record.model, "batch", record.owner, record.kind)
        try:
            async for page, _ in browse.pages(self._bus, layout.JOBS, subject, first=first):
                for stored in page:
                    name = stored.headers.get(headers.JOB_ID, "")
                    if name.startswith(f"{record.id}-"):
                        found[name] = stored
        except NotPermitted:
            read = await reads.through_a_worker(self._bus, "jobs", record.owner, record.id, first)
            found = {each.headers[headers.JOB_ID]: each for each in read}
        return found

    def _numbers(self, name: str, queued: Stored | None, result: bytes | None) -> list[int]:
        """The input lines of a job that an earlier process submitted."""
        if (number := self.record.alone.get(name)) is not None:
            return [number]
        try:
            if queued is not None:
                return [each.id for each in msgspec.json.decode(queued.data, type=Bundle).items]
            answer = _answer.decode(result or b"")
            answered = [each.id for each in answer.answers] + [each.id for each in answer.errors]
            return answered + answer.unstarted
        except (msgspec.DecodeError, UnicodeDecodeError):
            return []

    async def _sweep(self) -> None:
        """Removes what is left where the server may have forgotten that jobs had ended, or that they were."""
        if not self._disturbed and self._bus.reconnects == self._reconnects:
            return
        until, first = self._clock() + CANCEL_GRACE, max(self.record.oldest, 1)
        try:
            queued = await self._queued_jobs(first)
            await _bounded(self._cancel(name) for name in queued)
            while self._clock() < (until if queued else self._lost + CANCELLED_WITHIN):
                await asyncio.sleep(TICK)
                queued = await self._queued_jobs(first)
            await self._removal.remove(self.record.id, "jobs", first)
        except BusUnavailable as error:
            # It stays until it is too old, or until `batch rm`.
            log.warning("batch.leftovers_not_removed", batch=self.record.id, reason=error.message)

    async def _cancel(self, name: str) -> None:
        try:
            await publish_cancel(self._bus, Job(id=name, owner=self.record.owner))
        except (Overloaded, BusUnavailable) as error:
            log.warning("batch.job_not_cancelled", job=name, reason=error.message)

    # Cancelled, or expired.

    async def _end_early(self, backlog: Backlog, submitting: set[asyncio.Task[None]]) -> None:
        """Stops what runs, and writes an error line for every line that is not done."""
        assert self._ending is not None
        if self._ending == "cancelled":
            self.record.enter("cancelling", time.time())
        await self._save()
        if submitting:
            await asyncio.wait(submitting, timeout=CANCEL_GRACE)
        await _bounded(self._cancel(name) for name in list(self._open))
        for job in self._open.values():
            job.look = self._clock() + CANCEL_GRACE / 2
        until = self._clock() + CANCEL_GRACE
        while self._open and self._clock() < until:
            await self._collect(backlog, submitting)
        code = _CODES[self._ending]
        for name, job in list(self._open.items()):
            for line in job.lines.values():
                self._fail(line.number, line.custom_id, name, code)
            self._taken.append(name)
        self._open.clear()
        self._in_flight = 0
        for line in backlog.rest():
            self._fail(line.number, line.custom_id, None, code)
            if self._output.waiting >= 1000:
                await self._write()


class _Failed(msgspec.Struct, gc=False):
    error: ErrorBody | None = None


_CODES: Final[dict[Status, str]] = {"cancelled": "batch_cancelled", "expired": "batch_expired"}


def _as_error(problem: Problem) -> ErrorBody:
    return ErrorBody(code=problem.code, message=problem.message, param=problem.param)


def _number(name: str) -> int:
    return int(name.rpartition("-")[2])


async def _bounded(calls: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Makes many calls, some of them at a time."""
    waiting = iter(calls)

    async def work() -> None:
        for call in waiting:
            await call

    await asyncio.gather(*(work() for _ in range(PARALLEL)))
