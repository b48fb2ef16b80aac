"""A fleet of workers on a simulated broker: what can be done to it, and what must be true of it."""

from __future__ import annotations

import contextlib
import logging
import random
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, Final

import structlog

from inferbus.schemas import codec, headers
from inferbus.schemas.errors import PayloadTooLarge
from inferbus.schemas.subjects import JobClass, JobKey
from inferbus.workers.bus.connection.frames import publish_frame
from inferbus.workers.bus.interface import Stored
from inferbus.workers.bus.jetstream.layout import DEAD, JOBS, RESULTS
from inferbus.workers.client.messages import parse_result
from inferbus.workers.jobs.quarantine import LAST_ATTEMPTS
from inferbus.workers.jobs.runner import Work
from tests.simulation.jobs import SHAPES, Cancel, Submission, request
from tests.simulation.reader import Reader, agrees, told
from tests.simulation.worker import HANDLED, Worker
from tests.support.simulated import SUBJECTS, Server
from tests.support.virtual import EPOCH, Time

MODEL: Final = "scripted"
OWNER: Final = "acme"
INBOX: Final = "_INBOX.reader"
ACK_WAIT: Final = 30.0
WINDOW: Final = 20.0
CLOCK: Final = 0.1
"""Seconds by which a worker whose clock is wrong may be wrong about the server's, once it has read that."""

LETTER: Final = 600
"""Bytes that a dead letter may have beyond its job."""

DEFECTS: Final = frozenset({"job.defect", "request.defect"})


class World:
    """Everything.

    Args:
        seed: Of all that is left to chance: how long messages take; 0 for always the same.
        calm: No message takes seconds.
        workers: How many there are at the start.
        slots: Of each.
        attempts: At a job.
        buffering: Whether what workers send while NATS is away is sent later, or lost.
        max_payload: Of the server.
        skew: Seconds by which the workers' clocks are wrong: ahead and behind by turns.
    """

    def __init__(
        self,
        *,
        seed: int = 0,
        calm: bool = False,
        workers: int = 2,
        slots: int = 1,
        attempts: int = 3,
        buffering: bool = True,
        max_payload: int = 1024 * 1024,
        skew: float = 0.0,
    ) -> None:
        self.time = Time()
        self.server = Server(self.time, ack_wait=ACK_WAIT, window=WINDOW)
        self.server.published = self._published
        self.server.removed = self._removed
        self.slots = slots
        self.attempts = attempts
        self.buffering = buffering
        self.max_payload = max_payload
        self.skew = skew
        self._random = random.Random(seed) if seed else None
        self._calm = calm
        self.problems: list[str] = []
        self.trace: list[tuple[float, str]] = []
        self.submissions: dict[int, Submission] = {}
        self.repeats: dict[int, int] = {}
        self.cancels: list[Cancel] = []
        self.readers: dict[int, list[Reader]] = {}
        self.by_reply: dict[str, list[Reader]] = {}
        self.losing = 0
        self.runs: Counter[int] = Counter()
        self.given_up: Counter[int] = Counter()
        self.forgetful = False
        self.workers = [Worker(self, number) for number in range(workers)]
        self.everyone = list(self.workers)

    def latency(self) -> float:
        """Seconds that a message takes: a few milliseconds, and now and then some seconds."""
        if self._random is None:
            return 0.005
        if not self._calm and self._random.random() < 0.005:
            return self._random.uniform(0.5, 8.0)
        return self._random.uniform(0.001, 0.03)

    def note(self, text: str) -> None:
        """Adds to the course of events."""
        self.trace.append((self.time.now, text))

    def wrong(self, text: str) -> None:
        """Something that must not be."""
        self.problems.append(f"{self.time.now:.3f} {text}")
        self.note(f"WRONG {text}")

    def submit(
        self,
        job: int,
        name: str,
        *,
        shape: str = "tokens",
        job_class: JobClass = "batch",
        deadline: float | None = None,
        filler: int = 0,
    ) -> Submission | None:
        """Hands a job in; None where the server is away, or had it already."""
        if self.server.away:
            return None
        found = {headers.MSG_ID: f"j{job}"}
        made = SHAPES[shape]
        reply = SUBJECTS.stream(OWNER, f"j{job}")
        if made.inbox:
            reply = found[headers.REPLY_TO] = f"{INBOX}.{len(self.submissions)}"
        if deadline is not None:
            found[headers.DEADLINE] = str(deadline)
        subject = SUBJECTS.job(MODEL, job_class, OWNER, made.kind)
        key = JobKey(OWNER, f"j{job}")
        body = codec.encode(request(name, made, filler))
        try:
            publish_frame(subject, body, found, "", self.max_payload)
        except PayloadTooLarge:
            return None
        added = self.server.publish(subject, body, found)
        assert added is not None
        if added.duplicate:
            self.note(f"submit {key.job}: had that already, {added.sequence}")
            return None
        self.note(f"submit {key.job} as {added.sequence}: {name} {shape} {job_class} {deadline}")
        submitted = Submission(
            sequence=added.sequence,
            key=key,
            name=name,
            reply=reply,
            stored=self.time.now,
            deadline=None if deadline is None else self.time.now + deadline,
            size=len(body),
        )
        for number, earlier in self.submissions.items():
            if earlier.key == key and number not in self.repeats and self.time.now - earlier.stored < WINDOW:
                # The server should have dropped it, but has forgotten the id.
                self.repeats[added.sequence] = number
        self.submissions[added.sequence] = submitted
        reader = Reader(self.server, submitted)
        self.readers[added.sequence] = [reader]
        self.by_reply.setdefault(reply, []).append(reader)
        return submitted

    def cancel(self, job: int, *, named: int | None) -> None:
        """Cancels: what has that id, or one submission of it."""
        if self.server.away:
            return
        key = JobKey(OWNER, f"j{job}")
        aim = {} if named is None else {headers.SUBMISSION: str(named)}
        self.note(f"cancel {key.job} {named or ''}")
        self.cancels.append(Cancel(key, named, self.time.now))
        self.server.publish(SUBJECTS.cancel(key.owner, key.job), b"", aim)

    def away(self, seconds: float, *, forget: int) -> None:
        """NATS is gone for a while."""
        if self.server.away:
            return
        self.note(f"NATS away for {seconds}")
        self.forgetful = True
        self.server.go_away(forget=forget)
        self.time.after(seconds, self._back)

    def _back(self) -> None:
        if self.server.away:
            self.note("NATS back")
            self.server.come_back()

    def start(self, place: int) -> None:
        """Starts a worker in the place of one that is gone."""
        if self.workers[place].state in ("gone", "dead"):
            self.workers[place] = Worker(self, len(self.everyone))
            self.everyone.append(self.workers[place])
            self.note(f"start {self.workers[place].name}")

    def killed(self, worker: Worker) -> None:
        """A job took its worker with it; it is started again."""
        self.note(f"{worker.name} was killed by its job")
        worker.crash()
        self.time.after(
            3.0, lambda: self.start(self.workers.index(worker)) if worker in self.workers else None
        )

    def began(self, worker: Worker, work: Work) -> None:
        """An attempt reached the engine."""
        number, attempt = work.attempt.submission or 0, work.attempt.number
        job = self.submissions[number]
        self.note(f"{worker.name} begins {number} attempt {attempt}, points {len(work.resume_points)}")
        self.runs[number] += 1
        if number in self.repeats:
            self.wrong(f"{worker.name} begins {number}, which is {self.repeats[number]} handed in once more")
        if worker.over is not None:
            self.wrong(f"{worker.name} begins {number} after its grace period was over")
        # Whoever gives a job up in good order has not used up an attempt, and nor has the one after it: what
        # became of that is not known. A server that has forgotten what was said has lost count. The first
        # one of several is not counted when it begins.
        uncounted = 1 if self.attempts > 1 else 0
        allowed = self.attempts - 1 + LAST_ATTEMPTS + uncounted + 2 * self.given_up[number]
        if self.runs[number] > allowed and not self.forgetful:
            self.wrong(f"{worker.name} begins {number} for the {self.runs[number]}th time")
        if job.deadline is not None and self.time.now >= job.deadline + (CLOCK if self.skew else 0.0):
            self.wrong(f"{worker.name} begins {number} after its deadline")
        taken = HANDLED.get().received
        if any(cancel.aims_at(job) and cancel.time < taken for cancel in self.cancels):
            self.wrong(f"{worker.name} begins {number}, which had been cancelled when it took it")

    def check_at_rest(self, worker: Worker) -> None:
        """Nothing may be left at a worker that has nothing to do."""
        left = {
            "slots": worker.admission.busy,
            "scopes": len(worker.runner.scopes),
            "tasks": len(worker.tasks),
            "legs": worker.engine.running,
            "deliveries": len(worker.deliveries.open),
        }
        if worker.state == "up":
            # Of one that is about to exit, it is its end that ends them.
            left["signs of life"] = len(worker.signs.open)
        if any(left.values()):
            self.wrong(f"{worker.name} has left {left}")

    def settle(self, *, within: float = 5000.0) -> None:
        """Everything is well again, and runs until nothing is left to do."""
        self.note("settle")
        self._back()
        for place, worker in enumerate(list(self.workers)):
            worker.connection.mend()
            worker.resume()
            self.start(place)
        self.losing = 0
        self.time.run(within, until=self._at_rest)
        if not self._at_rest():
            left = list(self.server.streams[JOBS].messages)
            self.wrong(f"not at rest: {left} in the queue")
        # What is on its way arrives.
        self.time.run(20.0)

    def _at_rest(self) -> bool:
        for place in range(len(self.workers)):
            self.start(place)
        return not self.server.streams[JOBS].messages and all(
            worker.state == "up" and worker.idle for worker in self.workers
        )

    def check(self) -> None:
        """What must be true once everything has settled."""
        for worker in self.workers:
            self.check_at_rest(worker)
        for sequence, old, new in self.server.disturbed:
            self.wrong(f"{sequence} was asked back by attempt {old} while attempt {new} had it")
        results: dict[int, list[Stored]] = {}
        for result in self.server.streams[RESULTS].messages.values():
            if headers.BEGUN not in result.headers:
                results.setdefault(int(result.headers[headers.SUBMISSION]), []).append(result)
        letters = Counter(
            int(letter.headers[headers.SUBMISSION]) for letter in self.server.streams[DEAD].messages.values()
        )
        for number, job in self.submissions.items():
            self._check_end(job, results.get(number, []), letters[self.repeats.get(number, number)])
            self._check_readers(job)

    def close(self) -> None:
        """Ends every worker."""
        for worker in self.everyone:
            worker.crash()

    def _check_end(self, job: Submission, own: list[Stored], letters: int) -> None:
        number = job.sequence
        if len(own) > 1:
            self.wrong(f"{number} has {len(own)} results")
        if letters > 1:
            self.wrong(f"{number} has {letters} dead letters")
        if not own:
            newest = self.server.last(RESULTS, SUBJECTS.result(job.key.owner, job.key.job))
            if newest is None or int(newest.headers[headers.SUBMISSION]) < number:
                self.wrong(f"{number} has no result")
            return
        result = own[0]
        status = result.headers[headers.STATUS]
        error = parse_result(result.data, result.headers).error
        self.note(f"{number} ended {status} {error and error.code} by {result.headers[headers.WORKER]}")
        if error is not None and error.code == "internal_error":
            self.wrong(f"{number} ended in a defect")
        meant = self.submissions[self.repeats.get(number, number)]
        if status == "cancelled" and not any(cancel.aims_at(meant) for cancel in self.cancels):
            self.wrong(f"{number} was cancelled, and nobody wanted that")
        if status == "expired":
            told = (result.time - EPOCH).total_seconds()
            if meant.deadline is None or told < meant.deadline - (CLOCK if self.skew else 0.0):
                self.wrong(f"{number} expired at {told}, and its deadline was {meant.deadline}")
        if letters and status != "error":
            self.wrong(f"{number} has a dead letter and the result {status}")
        died = error is not None and error.code in ("attempts_exhausted", "engine_failed")
        if died and not letters and job.size + LETTER < self.max_payload:
            self.wrong(f"{number} died without a dead letter")

    def _check_readers(self, job: Submission) -> None:
        late = Reader(self.server, job)
        subject = SUBJECTS.result(job.key.owner, job.key.job)
        found = [
            result
            for result in self.server.read(RESULTS, subject)
            if int(result.headers[headers.SUBMISSION]) >= job.sequence
        ]
        for who, reader in (("late", late), *(("live", each) for each in self.readers[job.sequence])):
            reader.look()
            outcome = reader.assembler.final_status
            if outcome is None:
                self.wrong(f"a {who} reader of {job.sequence} waits for ever")
            elif not any(agrees(reader, result) for result in found):
                self.wrong(
                    f"a {who} reader of {job.sequence} saw {outcome.status} {reader.seen} {reader.reasons}; "
                    f"the result is {[(each.headers[headers.STATUS], *told(each)) for each in found]}"
                )

    def _published(self, message: Stored) -> None:
        readers = self.by_reply.get(message.subject)
        if readers is None:
            return
        if self.losing:
            self.losing -= 1
            return
        for reader in readers:
            reader.take(message)

    def _removed(self, job: Stored) -> None:
        """A job leaves the queue only once it has its result."""
        known = self.submissions[job.sequence]
        newest = self.server.last(RESULTS, SUBJECTS.result(known.key.owner, known.key.job))
        if newest is None or int(newest.headers[headers.SUBMISSION]) < job.sequence:
            self.wrong(f"{job.sequence} leaves the queue without a result")


@contextlib.contextmanager
def watched(found: Callable[[str], None]) -> Iterator[None]:
    """Keeps the product's log quiet, and tells of defects in it."""

    def collect(logger: Any, method: str, event: Any) -> Any:
        if event["event"] in DEFECTS:
            found(f"{event['event']}: {event.get('exc_info')!r}")
        raise structlog.DropEvent

    before = structlog.get_config()
    structlog.configure(
        processors=[collect], wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR)
    )
    try:
        yield
    finally:
        structlog.configure(**before)
