"""What a worker keeps of live answers to send it again, and how much."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import pytest

from inferbus.schemas.errors import Cancelled
from inferbus.schemas.subjects import JobKey
from inferbus.workers.jobs import retained
from inferbus.workers.jobs.listeners import Listeners
from inferbus.workers.jobs.retained import AWAY, RetainedAnswer, RetainedAnswers
from inferbus.workers.jobs.scope import Scope
from tests.support.eventually import eventually
from tests.support.memory import BoundedBroker, MemoryBroker

END = {"Infer-Status": "ok"}


class Clock:
    """Time that only the test moves."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def broker() -> MemoryBroker:
    return MemoryBroker()


@pytest.fixture
def answers(broker: MemoryBroker, clock: Clock) -> RetainedAnswers:
    return RetainedAnswers(broker, clock=clock)


def filled(answers: RetainedAnswers, job: str = "j", *, messages: int = 5, size: int = 1) -> RetainedAnswer:
    answer = answers.open(job, "token", "_INBOX.first")
    for number in range(messages):
        answer.append(b"%d" % number * size)
    return answer


async def test_messages_are_sent_again_from_a_number_on_with_the_end_mark(
    answers: RetainedAnswers, broker: MemoryBroker
) -> None:
    answer = filled(answers)
    answer.end(END)
    assert answers.find("j", "another token") is None
    assert answers.find("j", "token") is answer
    assert answer.resume("_INBOX.second", 3) == 3
    assert [(each.subject, each.data) for each in broker.sent] == [
        ("_INBOX.second", b"3"),
        ("_INBOX.second", b"4"),
        ("_INBOX.second", b""),
    ]
    assert broker.sent[-1].headers == END
    assert answer.reply == "_INBOX.second"
    assert answer.sent == 6


async def test_the_end_mark_alone_is_sent_again(answers: RetainedAnswers, broker: MemoryBroker) -> None:
    answer = filled(answers)
    answer.end(END)
    assert answer.resume("_INBOX.second", 5) == 5
    assert [each.data for each in broker.sent] == [b""]


async def test_one_caller_does_not_have_a_worker_send_all_the_time(
    answers: RetainedAnswers, broker: MemoryBroker, clock: Clock
) -> None:
    answer = filled(answers)
    for _ in range(10):
        assert answer.resume("_INBOX.second", 0) == 0
    assert len(broker.sent) == 5
    clock.seconds += retained.PAUSE
    answer.resume("_INBOX.second", 0)
    assert len(broker.sent) == 10


async def test_nothing_is_sent_again_while_too_much_waits_to_be_sent(
    answers: RetainedAnswers, broker: MemoryBroker
) -> None:
    broker.congested = True
    assert filled(answers).resume("_INBOX.second", 2) == 2
    assert not broker.sent


async def test_a_server_that_takes_less_than_before_makes_a_message_one_that_cannot_be_had(
    clock: Clock,
) -> None:
    answer = filled(RetainedAnswers(BoundedBroker(), clock=clock), size=20_000)
    assert answer.resume("_INBOX.second", 2) == answer.sent


async def test_of_a_long_answer_the_newest_part_is_kept(answers: RetainedAnswers) -> None:
    answer = filled(answers, messages=3000, size=256)
    assert retained.ANSWER_BYTES / 2 < answers.size < retained.ANSWER_BYTES * 1.1
    first = answer.resume("_INBOX.second", 0)
    assert 0 < first < answer.sent == 3000


async def test_all_answers_together_have_a_bound_and_those_that_ended_first_go_first(
    answers: RetainedAnswers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retained, "TOTAL_BYTES", 100_000)
    running = filled(answers, "running")
    for number in range(1000):
        filled(answers, f"j{number}").end(END)
        assert answers.size <= 100_000
    assert answers.find("j0", "token") is None
    assert answers.dropped("j0", "token") == 6
    assert answers.find("j999", "token") is not None
    assert answers.find("running", "token") is running
    assert len(answers) < 60


async def test_running_answers_have_that_bound_too_and_lose_in_turns(
    answers: RetainedAnswers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retained, "TOTAL_BYTES", 200_000)
    opened = [answers.open(f"j{number}", "token", "_INBOX.first") for number in range(8)]
    for _ in range(1000):
        for answer in opened:
            answer.append(b"x" * 500)
        assert answers.size <= 200_000
    # What is not counted yet is bounded for each answer.
    kept = [answer.sent - answer.resume("_INBOX.second", 0) for answer in opened]
    assert sum(kept) * 500 < 200_000 + len(opened) * retained.STEP
    assert sum(count > 0 for count in kept) > 4


async def test_only_so_many_dropped_answers_are_remembered(
    answers: RetainedAnswers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retained, "TOTAL_BYTES", 0)
    monkeypatch.setattr(retained, "DROPPED", 3)
    for number in range(5):
        filled(answers, f"j{number}").end(END)
    assert [answers.dropped(f"j{number}", "token") for number in range(5)] == [None, None, 6, 6, 6]
    assert not len(answers)
    assert not answers.size


async def test_an_ended_answer_is_kept_for_a_while_and_longer_where_nobody_could_ask(
    broker: MemoryBroker, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retained, "SWEEP", 0.001)
    settled, looks = False, 0

    def is_settled() -> bool:
        nonlocal looks
        looks += 1
        return settled

    async def looked() -> None:
        before = looks
        await eventually(lambda: looks > before)

    answers = RetainedAnswers(broker, settled=is_settled, clock=clock)
    filled(answers, "old").end(END)
    clock.seconds += 2 * AWAY
    await looked()
    assert answers.find("old", "token") is not None
    settled = True
    clock.seconds += AWAY / 2
    filled(answers, "young").end(END)
    await looked()
    assert answers.find("old", "token") is not None
    clock.seconds += AWAY / 2
    await eventually(lambda: answers.find("old", "token") is None)
    assert answers.dropped("old", "token") == 6
    assert answers.find("young", "token") is not None
    clock.seconds += AWAY
    await eventually(lambda: not len(answers))
    assert not answers.size


async def test_an_answer_that_another_worker_gives_is_not_this_ones(answers: RetainedAnswers) -> None:
    answer = answers.open("j", "token", "_INBOX.first")
    answer.close()
    assert answers.find("j", "token") is None
    assert answers.dropped("j", "token") is None
    answer = filled(answers)
    answer.end(END)
    answer.close()
    assert answers.find("j", "token") is answer


async def was_ended(scope: Scope) -> bool:
    """Whether a scope was ended."""

    async def nothing() -> None:
        return

    with contextlib.suppress(Cancelled):
        await scope.run(nothing())
        return False
    return True


@pytest.mark.parametrize(
    ("after", "returns", "over"), [(AWAY - 2, False, False), (AWAY, False, True), (AWAY, True, False)]
)
async def test_a_caller_that_asks_for_what_it_missed_may_be_away_for_a_while(
    clock: Clock, after: float, returns: bool, over: bool
) -> None:
    report: list[Callable[[str], None]] = []

    def open_probe(gone: Callable[[str], None]) -> str:
        report.append(gone)
        return "probe"

    listeners = Listeners(open_probe, clock=clock)
    scope = Scope(JobKey("live", "j"), submission=None)
    with listeners.expected("_INBOX.first", scope, may_be_away=True):
        [gone] = report
        gone("_INBOX.first")
        clock.seconds += 1
        if returns:
            listeners.moved("_INBOX.first", "_INBOX.second")
        clock.seconds += after
        gone("_INBOX.second" if returns else "_INBOX.first")
    assert await was_ended(scope) is over
