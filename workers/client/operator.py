"""What an operator can do: see to dead letters, look into the queues, pause them, compare streams.

    async with Client.connect(url) as client:
        operator = Operator(client.bus)
        async for letter in operator.letters(model="llama"):
            await operator.replay(letter.letter)

None of these need a worker, and none of them take a job from one.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import AsyncIterator, Mapping
from typing import Final

import msgspec

from inferbus.schemas import headers
from inferbus.schemas.errors import BusUnavailable, InferbusError, InvalidSubject
from inferbus.schemas.subjects import CLASSES, JobClass, escape
from inferbus.workers.bus.connection.bus import Bus
from inferbus.workers.bus.errors import CONSUMER_NOT_FOUND, NOT_FOUND, ApiError
from inferbus.workers.bus.interface import Stored
from inferbus.workers.bus.jetstream import browse, layout
from inferbus.workers.bus.jetstream.client import JetStream
from inferbus.workers.client.jobs import Job, hand_in, stop
from inferbus.workers.client.messages import read_result, submission
from inferbus.workers.client.records import (
    NO_END,
    CancelMark,
    Ending,
    JobReport,
    Letter,
    Queue,
    QueuedJob,
    job_address,
    job_id,
)
from inferbus.workers.client.survey import StreamState, adopt, survey
from inferbus.workers.config import Settings

_LETTERS_OWN: Final = frozenset(
    {
        headers.REASON,
        headers.DETAIL,
        headers.ATTEMPT,
        headers.SUBJECT,
        headers.SUBMISSION,
        headers.WORKER,
    }
)
"""What a dead letter has beside the headers of its job."""

_SERVERS: Final = "nats-"
"""Headers that were meant for the server when the job was submitted: its id, what it expected to be there."""


class Replayed(msgspec.Struct, frozen=True, kw_only=True):
    """A dead letter whose job is queued again.

    Attributes:
        letter: Its sequence.
        job: The job, as it is queued now.
        before: Whether it had been queued before, by a replay that did not come to its end.
    """

    letter: int
    job: Job
    before: bool


class Operator:
    """See the module.

    Args:
        bus: The connection; its user needs more permissions than that of a client (docs/operating.md).
    """

    def __init__(self, bus: Bus) -> None:
        self._bus = bus

    async def letters(self, *, model: str | None = None) -> AsyncIterator[Letter]:
        """The dead letters that are there now, oldest first.

        Raises:
            BusUnavailable: JetStream is off, has no such stream, or may not be asked; says which.
        """
        info = await browse.stream_info(self._bus, layout.DEAD)
        now, last = browse.server_time(info), info["state"]["last_seq"]
        async for page, _ in browse.pages(self._bus, layout.DEAD, self._dead(model)):
            for stored in page:
                # Not one that was written since: a job that dies at once would be replayed for ever.
                if stored.sequence > last:
                    return
                yield Letter.of(stored, self._bus.subjects, now)

    async def letter(self, sequence: int) -> tuple[Letter, Stored] | None:
        """One dead letter, and the message that it is: all its headers, and the body of its job."""
        stored = await browse.get(self._bus, layout.DEAD, sequence)
        if stored is None:
            return None
        return Letter.of(stored, self._bus.subjects, dt.datetime.now(dt.UTC)), stored

    async def replay(self, sequence: int, *, deadline: bool = True) -> Replayed | None:
        """Queues the job of a dead letter again, as a new submission under its old id; removes the letter.

        In this order, and under a message id of the letter's own: a replay that was interrupted between the
        two may be repeated within the stream's window (`streams.duplicate_window`), and queues nothing twice.

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
            # Whoever may write letters must not have an operator publish anywhere else.
            raise InvalidSubject(f"dead letter {sequence} does not say which job's subject it came from")
        found = _as_submitted(stored, deadline=deadline)
        ack = await hand_in(self._bus, subject, stored.data, found)
        try:
            await self.discard(sequence)
        except BusUnavailable as error:
            raise BusUnavailable(
                f"dead letter {sequence} was replayed as submission {ack.sequence} "
                f"but not removed: {error.message}"
            ) from error
        name = found.get(headers.JOB_ID) or found[headers.MSG_ID]
        job = Job(id=name, owner=address.owner, submission=ack.sequence)
        return Replayed(letter=sequence, job=job, before=ack.duplicate)

    async def discard(self, sequence: int) -> bool:
        """Removes a dead letter for good; whether it was there."""
        return await browse.remove(self._bus, layout.DEAD, sequence)

    async def discard_all(self, *, model: str | None = None) -> int:
        """Removes all dead letters that are there now for good; returns how many."""
        info = await browse.stream_info(self._bus, layout.DEAD)
        return await browse.purge(self._bus, layout.DEAD, self._dead(model), until=info["state"]["last_seq"])

    async def queues(self, *, model: str | None = None, job_class: JobClass | None = None) -> list[Queue]:
        """The queues of every model and class that a worker has ever served here.

        Raises:
            BusUnavailable: JetStream is off, has no such stream, or may not be asked; says which.
        """
        found = [
            Queue.of(info, self._bus.subjects) for info in await browse.consumers(self._bus, layout.JOBS)
        ]
        return [
            each
            for each in found
            if each is not None and model in (None, each.model) and job_class in (None, each.job_class)
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
            model: Of this model.
            job_class: Of this class.
            owner: Of this owner.
            most: No more than this; the server sends their bodies along.

        Raises:
            BusUnavailable: JetStream is off, has no such stream, or may not be asked; says which.
        """
        info = await browse.stream_info(self._bus, layout.JOBS)
        queues = await self.queues(model=model, job_class=job_class)
        tokens = [escape(each) if each else "*" for each in (model, job_class, owner)]
        subject = f"{self._bus.subjects.all('jobs').removesuffix('>')}{'.'.join(tokens)}.*"
        found: list[QueuedJob] = []
        further = 0
        async for page, beyond in browse.pages(self._bus, layout.JOBS, subject, most=most):
            found.extend(self._queued(page, queues, browse.server_time(info)))
            further = beyond
        return found, further

    async def job(self, owner: str, name: str) -> JobReport:
        """All that is known of one job.

        Raises:
            BusUnavailable: JetStream is off, or may not be asked; says which.
        """
        subjects = self._bus.subjects
        queued = [each for each in (await self.jobs(owner=owner))[0] if each.job == name]
        result = await self._last(layout.RESULTS, subjects.result(owner, name))
        mark = await self._last(layout.CANCEL, subjects.cancel(owner, name))
        chunk = await self._last(layout.STREAM, subjects.stream(owner, name))
        letters = [each async for each in self.letters() if (each.owner, each.job) == (owner, name)]
        newest = max((each.submission for each in queued), default=None)
        traces = [stored.headers for stored in (result, chunk) if stored is not None]
        attempts = [
            headers.number(found, headers.ATTEMPT) or 0
            for found in traces
            # Of what is queued now, where that is anything: an older submission counted for itself.
            if newest is None or submission(found) == newest
        ]
        if newest is None:
            attempts += [each.attempts or 0 for each in letters]
        return JobReport(
            owner=owner,
            job=name,
            queued=queued,
            result=None if result is None else _ending(result),
            cancel=None if mark is None else _mark(mark),
            letters=letters,
            attempts=max(attempts, default=0) or None,
        )

    async def cancel(self, owner: str, name: str) -> None:
        """Stops every submission of a job that is there by now."""
        await stop(self._bus, Job(id=name, owner=owner))

    async def pause(
        self, model: str, *, job_class: JobClass | None = None, seconds: float | None = None
    ) -> list[Queue]:
        """Has no job of a model be given out; those that run go on, and so do live requests.

        Args:
            model: This model.
            job_class: Only of this class.
            seconds: For so long; None: until `resume`.

        Returns:
            Its queues, as they are now.

        Raises:
            BusUnavailable: There is no such queue, or the server does not allow it.
        """
        if seconds is None:
            seconds = NO_END.total_seconds()
        return await self._pause(model, job_class, dt.timedelta(seconds=seconds))

    async def resume(self, model: str, *, job_class: JobClass | None = None) -> list[Queue]:
        """Has the jobs of a model be given out again; arguments as for `pause`."""
        return await self._pause(model, job_class, None)

    async def streams(self, settings: Settings) -> list[StreamState]:
        """Every stream of the contract, and whether it and its consumers are as these settings ask for.

        Raises:
            BusUnavailable: JetStream is off, or may not be asked; says which.
        """
        return await survey(self._bus, settings)

    async def adopt(self, settings: Settings) -> None:
        """Makes the streams that are missing, and raises what is weaker than asked for; lowers nothing.

        Raises:
            BusUnavailable: The server refuses a change, or may not be asked; says which.
        """
        await adopt(self._bus, settings, await survey(self._bus, settings))

    def _dead(self, model: str | None) -> str:
        every = self._bus.subjects.all("dead")
        return every if model is None else f"{every.removesuffix('>')}{escape(model)}.*"

    def _queued(self, page: list[Stored], queues: list[Queue], now: dt.datetime) -> list[QueuedJob]:
        delivered = {(each.model, each.job_class): each.delivered for each in queues}
        found = []
        for stored in page:
            address = job_address(stored.subject, self._bus.subjects)
            if address is None:
                continue  # The next worker that gets it throws it away.
            found.append(
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
                    # A job that has ended is not in the stream any more.
                    taken=stored.sequence <= delivered.get((address.model, address.job_class), 0),
                )
            )
        return found

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
        there = [info for info in infos if info["name"] in names]
        if not there:
            raise ApiError(
                f"no worker has ever served {job_class or 'durable'} jobs of {model}: there is no queue",
                status=NOT_FOUND,
                err_code=CONSUMER_NOT_FOUND,
            )
        for info in there:
            until = None if span is None else browse.server_time(info) + span
            await browse.pause(self._bus, layout.JOBS, info["name"], until)
        return [each for each in await self.queues(model=model) if each.consumer in names]


def _as_submitted(letter: Stored, *, deadline: bool) -> dict[str, str]:
    """The headers of a dead letter's job, with a message id that every replay of this letter has.

    The letter's time is part of it: its number alone could be guessed, and whoever may submit jobs could use
    the id up before; and it begins anew with the stream.
    """
    found = {
        name: value
        for name, value in letter.headers.items()
        if name not in _LETTERS_OWN and not name.lower().startswith(_SERVERS)
    }
    if not deadline:
        found.pop(headers.DEADLINE, None)
    found[headers.MSG_ID] = f"replay-{letter.sequence}-{letter.time.timestamp():.6f}"
    return found


def _ending(result: Stored) -> Ending:
    found: Mapping[str, str] = result.headers
    try:
        read = read_result(result.data, found)
        status, problem = read.status, read.error
    except InferbusError as error:
        status, problem = None, error
    return Ending(
        status=status,
        code=None if problem is None else problem.code,
        attempt=headers.number(found, headers.ATTEMPT),
        worker=found.get(headers.WORKER),
        submission=submission(found),
        stored=result.time,
    )


def _mark(stored: Stored) -> CancelMark:
    return CancelMark(asked=stored.time, submission=submission(stored.headers))
