"""What may happen to a fleet: plans, which can be written down, and strategies that make them up."""

from __future__ import annotations

import itertools
from typing import Any, Final

import msgspec
from hypothesis import strategies as st

from inferbus.schemas.subjects import CLASSES, JobClass
from tests.simulation.jobs import NAMES, SHAPES
from tests.simulation.world import World, watched

JOBS: Final = 3
"""Ids that jobs may have: few, so that they come again."""

TICK: Final = 0.001
"""Seconds from one step to the next."""


class Step(msgspec.Struct, frozen=True, repr_omit_defaults=True):
    """One thing that happens."""

    def do(self, world: World) -> None:
        """Makes it happen."""


class Wait(Step, frozen=True):
    """Time passes."""

    seconds: float

    def do(self, world: World) -> None:
        world.time.run(self.seconds)


class Submit(Step, frozen=True):
    """A job is handed in."""

    job: int = 0
    name: str = "quick"
    shape: str = "tokens"
    job_class: JobClass = "batch"
    deadline: float | None = None
    filler: int = 0

    def do(self, world: World) -> None:
        deadline = 40.0 if self.name == "hang" and self.deadline is None else self.deadline
        world.submit(
            self.job,
            self.name,
            shape=self.shape,
            job_class=self.job_class,
            deadline=deadline,
            filler=self.filler,
        )


class CancelJob(Step, frozen=True):
    """A job is cancelled: all of it that was submitted so far, or one submission, counted from the last."""

    job: int = 0
    back: int | None = None

    def do(self, world: World) -> None:
        known = [each.sequence for each in world.submissions.values() if each.key.job == f"j{self.job}"]
        named = None if self.back is None or self.back >= len(known) else known[-1 - self.back]
        world.cancel(self.job, named=named)


class Stall(Step, frozen=True):
    """A worker stands still."""

    worker: int = 0
    seconds: float = 40.0

    def do(self, world: World) -> None:
        worker = world.workers[self.worker % len(world.workers)]
        world.note(f"{worker.name} stands still for {self.seconds}")
        worker.stall(self.seconds)


class Crash(Step, frozen=True):
    """A worker is killed."""

    worker: int = 0
    lost: bool = False

    def do(self, world: World) -> None:
        worker = world.workers[self.worker % len(world.workers)]
        world.note(f"{worker.name} is killed")
        worker.crash(lost=self.lost)


class Start(Step, frozen=True):
    """A worker is started in the place of one that is gone."""

    worker: int = 0

    def do(self, world: World) -> None:
        world.start(self.worker % len(world.workers))


class Drain(Step, frozen=True):
    """A worker is told to stop; a second time, that it should hurry."""

    worker: int = 0
    grace: float = 10.0

    def do(self, world: World) -> None:
        worker = world.workers[self.worker % len(world.workers)]
        world.note(f"{worker.name} drains")
        worker.drain(self.grace)


class Away(Step, frozen=True):
    """NATS is away, and forgets the newest chunks."""

    seconds: float = 10.0
    forget: int = 0

    def do(self, world: World) -> None:
        world.away(self.seconds, forget=self.forget)


class Cut(Step, frozen=True):
    """One worker's connection is down, while the others' are not."""

    worker: int = 0
    seconds: float = 10.0

    def do(self, world: World) -> None:
        worker = world.workers[self.worker % len(world.workers)]
        world.note(f"{worker.name} is cut off for {self.seconds}")
        worker.connection.cut()
        world.time.after(self.seconds, worker.connection.mend)


class Lose(Step, frozen=True):
    """The next messages do not reach their readers."""

    messages: int = 1

    def do(self, world: World) -> None:
        world.losing += self.messages


class Look(Step, frozen=True):
    """The readers look at what is stored."""

    def do(self, world: World) -> None:
        if not world.server.away:
            for readers in world.readers.values():
                for reader in readers:
                    reader.look()


class Forget(Step, frozen=True):
    """Chunks are kept for a while only."""

    def do(self, world: World) -> None:
        world.forgetful = True
        world.server.forget_chunks()


class Plan(msgspec.Struct, frozen=True, repr_omit_defaults=True):
    """A course of events, which is the same whenever it is run."""

    steps: list[Step]
    seed: int = 0
    workers: int = 2
    slots: int = 1
    attempts: int = 3
    buffering: bool = True
    max_payload: int = 1024 * 1024
    skew: float = 0.0

    def run(self) -> World:
        """Runs it, and lets everything come to an end.

        Raises:
            AssertionError: Something was not as it must be; tells what, and how it came to that.
        """
        world = World(
            seed=self.seed,
            workers=self.workers,
            slots=self.slots,
            attempts=self.attempts,
            buffering=self.buffering,
            max_payload=self.max_payload,
            skew=self.skew,
        )
        try:
            with watched(world.wrong):
                for step in self.steps:
                    world.time.run(TICK)
                    step.do(world)
                world.settle()
                world.check()
        finally:
            world.close()
        if world.problems:
            course = "\n".join(f"{when:10.3f} {what}" for when, what in world.trace)
            raise AssertionError("\n".join([*world.problems, "", f"{self!r}.run()", "", course]))
        return world


def _few(*values: Any) -> st.SearchStrategy[Any]:
    return st.sampled_from(values)


WORKERS: Final = st.integers(0, 2)
IDS: Final = st.integers(0, JOBS - 1)
SPANS: Final = _few(0.01, 0.1, 1.0, 3.0, 10.0, 31.0, 45.0, 61.0, 130.0)

WAITS: Final = st.builds(Wait, SPANS)
SUBMISSIONS: Final = st.builds(
    Submit,
    IDS,
    st.sampled_from(NAMES),
    st.sampled_from(list(SHAPES)),
    st.sampled_from(CLASSES),
    _few(None, None, None, 2.0, 20.0),
    _few(0, 0, 0, 100, 250, 300),
)
LASTING: Final = st.builds(
    Submit, IDS, _few("steady", "long", "other"), _few("tokens", "chat"), st.sampled_from(CLASSES)
)
TROUBLE: Final[st.SearchStrategy[Step]] = st.one_of(
    st.builds(CancelJob, IDS, _few(None, 0, 1)),
    st.builds(Stall, WORKERS, _few(5.0, 14.0, 29.0, 31.0, 40.0, 100.0)),
    st.builds(Crash, WORKERS, st.booleans()),
    st.builds(Drain, WORKERS, _few(0.0, 3.0, 30.0)),
    st.builds(Away, _few(0.02, 4.0, 35.0, 100.0, 400.0), _few(0, 1, 5)),
    st.builds(Cut, WORKERS, _few(0.02, 4.0, 25.0, 35.0, 100.0)),
    st.builds(Start, WORKERS),
    st.builds(Lose, _few(1, 3, 20)),
    st.sampled_from([Look(), Forget()]),
)
STEPS: Final[st.SearchStrategy[Step]] = _few(WAITS, SUBMISSIONS, LASTING, WAITS, TROUBLE, TROUBLE).flatmap(
    lambda steps: steps
)

PLANS: Final[st.SearchStrategy[Plan]] = st.builds(
    Plan,
    # Several short lists, since one list is seldom long.
    st.tuples(st.lists(LASTING, max_size=3), *[st.lists(STEPS, max_size=12)] * 3).map(
        lambda parts: list(itertools.chain(*parts))
    ),
    seed=st.integers(0, 2**16),
    workers=st.integers(1, 3),
    slots=st.integers(1, 2),
    attempts=_few(3, 5),
    buffering=st.booleans(),
    max_payload=_few(1024 * 1024, 1024 * 1024, 1024),
    skew=_few(0.0, 0.0, 75.0),
)
