"""Asking whether anybody works on a live request."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from inferbus.schemas.subjects import Subjects
from inferbus.workers.bus.connection.message import Message
from inferbus.workers.bus.connection.permissions import Permissions, Refusal
from inferbus.workers.client import WorkerLost
from inferbus.workers.client.liveness import MAX_UNANSWERED, LivenessProbe


class Line:
    """A bus that nobody answers on, unless the test does."""

    def __init__(self) -> None:
        self.subjects = Subjects()
        self.permissions = Permissions()
        self.settled = self.connected = True
        self.asked: list[str] = []

    def may_publish(self, subject: str) -> bool:
        return self.permissions.may_publish(subject)

    def inbox(self, _callback: Any) -> Any:
        return SimpleNamespace(subject="_INBOX.x", close=lambda: None)

    def send(self, subject: str, _data: bytes, _headers: dict[str, str], *, reply: str) -> None:
        self.asked.append(subject)


def asking(line: Line) -> LivenessProbe:
    return LivenessProbe(line, "job", "token", lambda _message: None)  # type: ignore[arg-type]


def test_a_worker_is_gone_when_nobody_has_answered_for_a_while() -> None:
    line = Line()
    question = asking(line)
    for _ in range(MAX_UNANSWERED):
        question.ask(None)
    with pytest.raises(WorkerLost):
        question.ask(None)
    assert line.asked == ["infer.alive.live.job"] * MAX_UNANSWERED


def test_an_answer_and_a_connection_that_is_away_begin_the_count_anew() -> None:
    line = Line()
    question = asking(line)
    for number in range(5 * MAX_UNANSWERED):
        question.ask(None)
        if number % 4 == 0:
            assert question.alive(Message("_INBOX.x", b"", {"Infer-Worker": "w"}))
        line.settled = number % 3 != 0


def test_who_may_not_ask_of_one_request_asks_of_none_and_raises_no_alarm() -> None:
    line = Line()
    line.permissions.add(Refusal("publish", "infer.alive.live.other"))
    question = asking(line)
    for _ in range(3 * MAX_UNANSWERED):
        question.ask(None)
    assert not line.asked
