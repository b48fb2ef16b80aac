"""What an operator does: list and replay dead letters, inspect and pause queues, compare NATS streams.

    async with Client.connect(url) as client:
        operator = Operator(client.bus)
        async for letter in operator.dead_letters(model="llama"):
            await operator.replay(letter.letter)

None of this needs a worker, or takes a job from one.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Final

import msgspec

from inferbus.schemas import headers
from inferbus.schemas.errors import BusUnavailable, InferbusError, InvalidSubject, ModelNotFound
from inferbus.schemas.subjects import CLASSES, JobClass, escape, unescape
from inferbus.workers.bus.connection.bus import Bus
from inferbus.workers.bus.errors import NOT_FOUND, ApiError
from inferbus.workers.bus.interface import Stored
from inferbus.workers.bus.jetstream import browse, layout
from inferbus.workers.bus.jetstream.client import JetStream
from inferbus.workers.bus.jetstream.provision import provision
from inferbus.workers.bus.queue.consumers import job_consumers
from inferbus.workers.client.jobs import Job, publish_cancel, publish_job
from inferbus.workers.client.messages import parse_result, submission_of
from inferbus.workers.client.models import never_served
from inferbus.workers.client.records import (
    NO_END,
    CancelMark,
    DeadLetter,
    JobReport,
    Queue,
    QueuedJob,
    ResultSummary,
    job_address,
    job_id,
)
from inferbus.workers.client.survey import StreamState, adopt, survey
from inferbus.workers.config import Settings

_DEAD_LETTER_HEADERS: Final = frozenset(
    {
        headers.REASON,
        headers.DETAIL,
        headers.ATTEMPT,
        headers.SUBJECT,
        headers.SUBMISSION,
        headers.WORKER,
    }
)
"""Headers that a dead letter has in addition to those of its job."""

_SERVER_PREFIX: Final = "nats-"
"""Prefix of headers that instructed the server when the job was submitted, such as `Nats-Msg-Id`."""


class Replayed(msgspec.Struct, frozen=True, kw_only=True):
    """A dead letter whose job is queued again.

    Attributes:
        letter: Its sequence.
        job: The job, as it is queued now.
        before: Whether an interrupted replay had queued it before.
    """

    letter: int
    job: Job
    before: bool


class Operator:
    """Operates the queues of one NATS server.

    Args:
        bus: The connection; its user needs more permissions than that of a client (docs/operating.md).
    """

    def __init__(self, bus: Bus) -> None:
        self._bus = bus

    async def dead_letters(self, *, model: str | None = None) -> AsyncIterator[DeadLetter]:
        """The dead letters stored now, oldest first.

        Raises:
            BusUnavailable: JetStream is off, has no such stream, or may not be asked; says which.
        """
        info = await browse.stream_info(self._bus, layout.DEAD)
        now, last = browse.server_time(info), info["state"]["last_seq"]
        async for page, _ in browse.pages(self._bus, layout.DEAD, self._dead(model)):
            for stored in page:
                # Letters written since then are skipped: a job that fails at once would be replayed for ever.
                if stored.sequence > last:
                    return
                yield DeadLetter.of(stored, self._bus.subjects, now)

    async def dead_letter(self, sequence: int) -> tuple[DeadLetter, Stored] | None:
        """One dead letter, and its message with all headers and the job's body."""
        stored = await browse.get(self._bus, layout.DEAD, sequence)
        if stored is None:
            return None
        return DeadLetter.of(stored, self._bus.subjects, dt.datetime.now(dt.UTC)), stored

    async def replay(self, sequence: int, *, deadline: bool = True) -> Replayed | None:
        """Queues the job of a dead letter again, as a new submission under its old id; removes the letter.

        In this order, and under a message id that is derived from the letter: a replay that was interrupted
        between the two may be repeated within `streams.duplicate_window`, and queues nothing twice.

        Args:
            sequence: The letter.
            deadline: Whether the job keeps its deadline; a moment that has passed expires it at once.

        Returns:
            None where there is no such letter: it was replayed or purged before.

        Raises:
            InvalidSubject: The letter does not name a job's subject; it stays where it is.
            BusUnavailable: The job was not queued, or the letter not removed; says which.
        """
        stored = await browse.get(self._bus, layout.DEAD, sequence)
        if stored is None:
            return None
        subject = stored.headers.get(headers.SUBJECT, "")
        address = job_address(subject, self._bus.subjects)
        if address is None:
            # Other programs may write letters: a replay must not publish to any subject of their choice.
            raise InvalidSubject(f"dead letter {sequence} does not say which job's subject it came from")
        message_headers = _as_submitted(stored, deadline=deadline)
        ack = await publish_job(self._bus, subject, stored.data, message_headers)
        try:
            await self.discard(sequence)
        except BusUnavailable as error:
            raise BusUnavailable(
                f"dead letter {sequence} was replayed as submission {ack.sequence} but not removed: "
                f"{error.message}"
            ) from error
        name = message_headers.get(headers.JOB_ID) or message_headers[headers.MSG_ID]
        job = Job(id=name, owner=address.owner, submission=ack.sequence)
        return Replayed(letter=sequence, job=job, before=ack.duplicate)

    async def discard(self, sequence: int) -> bool:
        """Removes a dead letter for good; returns whether it was stored."""
        return await browse.remove(self._bus, layout.DEAD, sequence)

    async def discard_all(self, *, model: str | None = None) -> int:
        """Removes all dead letters stored now for good; returns how many."""
        info = await browse.stream_info(self._bus, layout.DEAD)
        until = info["state"]["last_seq"]
        return await JetStream(self._bus).purge(layout.DEAD, self._dead(model), until=until)

    async def queues(self, *, model: str | None = None, job_class: JobClass | None = None) -> list[Queue]:
        """The queues of every model and class that a worker has ever served.

        Raises:
            BusUnavailable: JetStream is off, has no such stream, or may not be asked; says which.
        """
        infos = await browse.consumers(self._bus, layout.JOBS)
        return [
            queue
            for queue in (Queue.of(info, self._bus.subjects) for info in infos)
            if queue is not None and model in (None, queue.model) and job_class in (None, queue.job_class)
        ]

    async def jobs(
        self,
        *,
        model: str | None = None,
        job_class: JobClass | None = None,
        owner: str | None = None,
        most: int | None = None,
    ) -> tuple[list[QueuedJob], int]:
        """Jobs that have not ended, oldest first, and the number of further ones.

        Args:
            model: Only of this model.
            job_class: Only of this class.
            owner: Only of this owner.
            most: Maximum number; the server sends the bodies too.

        Raises:
            BusUnavailable: JetStream is off, has no such stream, or may not be asked; says which.
        """
        info = await browse.stream_info(self._bus, layout.JOBS)
        queues = await self.queues(model=model, job_class=job_class)
        tokens = [escape(each) if each else "*" for each in (model, job_class, owner)]
        subject = f"{self._bus.subjects.all('jobs').removesuffix('>')}{'.'.join(tokens)}.*"
        jobs: list[QueuedJob] = []
        further = 0
        async for page, beyond in browse.pages(self._bus, layout.JOBS, subject, most=most):
            jobs.extend(self._queued(page, queues, browse.server_time(info)))
            further = beyond
        return jobs, further

    async def job(self, owner: str, name: str) -> JobReport:
        """Everything that is stored about one job.

        Raises:
            BusUnavailable: JetStream is off, or may not be asked; says which.
        """
        subjects = self._bus.subjects
        queued = [each for each in (await self.jobs(owner=owner))[0] if each.job == name]
        result = await self._last(layout.RESULTS, subjects.result(owner, name))
        mark = await self._last(layout.CANCEL, subjects.cancel(owner, name))
        chunk = await self._last(layout.STREAM, subjects.stream(owner, name))
        letters = [each async for each in self.dead_letters() if (each.owner, each.job) == (owner, name)]
        newest = max((each.submission for each in queued), default=None)
        traces = [stored.headers for stored in (result, chunk) if stored is not None]
        attempts = [
            headers.number(message_headers, headers.ATTEMPT) or 0
            for message_headers in traces
            # Where a submission is queued, only its own attempts count.
            if newest is None or submission_of(message_headers) == newest
        ]
        if newest is None:
            attempts += [each.attempts or 0 for each in letters]
        return JobReport(
            owner=owner,
            job=name,
            queued=queued,
            result=None if result is None else _summary(result),
            cancel=None if mark is None else _mark(mark),
            letters=letters,
            attempts=max(attempts, default=0) or None,
        )

    async def owners(self, name: str) -> list[str]:
        """The owners who have a job of this id: queued, dead, or with a stored result.

        Raises:
            BusUnavailable: JetStream is off, or may not be asked; says which.
        """
        found = {job.owner for job in (await self.jobs())[0] if job.job == name}
        found |= {letter.owner async for letter in self.dead_letters() if letter.job == name and letter.owner}
        results = self._bus.subjects.result("any", name).replace(".any.", ".*.")
        for stored in await JetStream(self._bus).read(layout.RESULTS, results):
            found.add(unescape(stored.subject.split(".")[-2]))
        return sorted(found)

    async def cancel(self, owner: str, name: str) -> list[QueuedJob]:
        """Stops every submission of a job up to now.

        Workers stop what runs, and discard what they take later. A queued job for a model and class that no
        worker has ever served is removed instead.

        Returns:
            The jobs that were removed.
        """
        await publish_cancel(self._bus, Job(id=name, owner=owner))
        try:
            queued, _ = await self.jobs(owner=owner)
        except BusUnavailable:
            return []  # A user who may only cancel.
        return [
            job
            for job in queued
            if job.job == name
            and await never_served(self._bus, job.model, [job.job_class])
            and await browse.remove(self._bus, layout.JOBS, job.submission)
        ]

    async def pause(
        self, model: str, *, job_class: JobClass | None = None, seconds: float | None = None
    ) -> list[Queue]:
        """Stops the delivery of a model's jobs; running jobs and live requests go on.

        Args:
            model: Of the jobs.
            job_class: Only of this class.
            seconds: Length of the pause; None: until `resume`.

        Returns:
            Its queues afterwards.

        Raises:
            ModelNotFound: There is no such queue.
            BusUnavailable: The server does not allow it.
        """
        if seconds is None:
            seconds = NO_END.total_seconds()
        return await self._pause(model, job_class, dt.timedelta(seconds=seconds))

    async def resume(self, model: str, *, job_class: JobClass | None = None) -> list[Queue]:
        """Resumes the delivery of a model's jobs; arguments as for `pause`."""
        return await self._pause(model, job_class, None)

    async def streams(self, settings: Settings) -> list[StreamState]:
        """Every NATS stream of the contract, compared with these settings, its consumers too.

        Raises:
            BusUnavailable: JetStream is off, or may not be asked; says which.
        """
        return await survey(self._bus, settings)

    async def adopt(
        self,
        settings: Settings,
        *,
        lower_replicas: bool = False,
        report: Callable[[str], None] = lambda change: None,
    ) -> None:
        """Creates missing NATS streams, and raises settings that are weaker; lowers nothing else.

        The streams of chunks and announcements are made anew, empty, where the server does not change how
        they are stored.

        Args:
            settings: As wanted.
            lower_replicas: Also lower the number of copies.
            report: Called with a line of text after every change.

        Raises:
            BusUnavailable: The server refuses a change, or may not be asked; says which.
        """
        states = await survey(self._bus, settings)
        await adopt(self._bus, settings, states, lower_replicas=lower_replicas, report=report)

    async def init(self, model: str, settings: Settings) -> None:
        """Has jobs of a model accepted: creates the missing NATS streams, and the model's consumers.

        Raises:
            InvalidSubject: No subject can carry that name.
            BusUnavailable: The server refuses it, or may not be asked; says which.
        """
        await provision(self._bus, settings.streams)
        classes = [name for name in CLASSES if name in settings.worker.classes]
        await job_consumers(self._bus, model, classes, ack_wait=settings.worker.ack_wait)

    def _dead(self, model: str | None) -> str:
        every = self._bus.subjects.all("dead")
        return every if model is None else f"{every.removesuffix('>')}{escape(model)}.*"

    def _queued(self, page: list[Stored], queues: list[Queue], now: dt.datetime) -> list[QueuedJob]:
        delivered = {(each.model, each.job_class): each.delivered for each in queues}
        jobs = []
        for stored in page:
            address = job_address(stored.subject, self._bus.subjects)
            if address is None:
                continue  # Not a job: the next worker that receives it discards it.
            jobs.append(
                QueuedJob(
                    submission=stored.sequence,
                    job=job_id(stored),
                    owner=address.owner,
                    model=address.model,
                    job_class=address.job_class,
                    kind=address.kind,
                    submitted=stored.time,
                    age=(now - stored.time).total_seconds(),
                    size=len(stored.data),
                    # A job that has ended is not in the NATS stream any more.
                    taken=stored.sequence <= delivered.get((address.model, address.job_class), 0),
                )
            )
        return jobs

    async def _last(self, stream: str, subject: str) -> Stored | None:
        try:
            return await JetStream(self._bus).last(stream, subject)
        except ApiError as error:
            if error.status != NOT_FOUND:
                raise
            return None

    async def _pause(self, model: str, job_class: JobClass | None, span: dt.timedelta | None) -> list[Queue]:
        names = [layout.durable(model, each) for each in CLASSES if job_class in (None, each)]
        infos = await browse.consumers(self._bus, layout.JOBS)
        paused = [info for info in infos if info["name"] in names]
        if not paused:
            known = sorted({queue.model for queue in await self.queues(job_class=job_class)})
            raise ModelNotFound(
                f"no worker has ever served {job_class or 'durable'} jobs of {model}; "
                f"there are queues of: {', '.join(known) or 'no model'}",
                param="model",
            )
        for info in paused:
            until = None if span is None else browse.server_time(info) + span
            await browse.pause(self._bus, layout.JOBS, info["name"], until)
        return [each for each in await self.queues(model=model) if each.consumer in names]


def _as_submitted(letter: Stored, *, deadline: bool) -> dict[str, str]:
    """The headers of a dead letter's job, with a message id that is the same for every replay of this letter.

    The letter's time is part of it: its sequence alone could be guessed and the id used up by anyone who may
    submit jobs, and sequences start again with a new NATS stream.
    """
    message_headers = {
        name: value
        for name, value in letter.headers.items()
        if name not in _DEAD_LETTER_HEADERS and not name.lower().startswith(_SERVER_PREFIX)
    }
    if not deadline:
        message_headers.pop(headers.DEADLINE, None)
    message_headers[headers.MSG_ID] = f"replay-{letter.sequence}-{letter.time.timestamp():.6f}"
    return message_headers


def _summary(result: Stored) -> ResultSummary:
    message_headers: Mapping[str, str] = result.headers
    try:
        parsed = parse_result(result.data, message_headers)
        status, problem = parsed.status, parsed.error
    except InferbusError as error:
        status, problem = None, error
    return ResultSummary(
        status=status,
        code=None if problem is None else problem.code,
        attempt=headers.number(message_headers, headers.ATTEMPT),
        worker=message_headers.get(headers.WORKER),
        submission=submission_of(message_headers),
        stored=result.time,
    )


def _mark(stored: Stored) -> CancelMark:
    return CancelMark(requested=stored.time, submission=submission_of(stored.headers))
