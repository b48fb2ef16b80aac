"""Requests that wait for their answer, by subject."""

from __future__ import annotations

import pytest

from inferbus.workers.bus.connection.inbox import Inboxes
from inferbus.workers.bus.connection.message import Message
from inferbus.workers.bus.connection.requests import Requests
from inferbus.workers.bus.errors import NotPermitted


async def test_the_first_answer_counts_and_nothing_is_left_behind() -> None:
    inboxes = Inboxes("_INBOX")
    requests = Requests(inboxes)
    with requests.open("ask") as (reply, answer):
        inboxes.dispatch(Message(reply, b"first"))
        inboxes.dispatch(Message(reply, b"second"))
        assert (await answer).data == b"first"
    assert (len(requests), len(inboxes)) == (0, 0)


async def test_a_refusal_ends_the_requests_on_its_subject_and_no_others() -> None:
    requests = Requests(Inboxes("_INBOX"))
    with requests.open("a.B") as (_, refused), requests.open("a.c") as (_, other):
        requests.refuse("a.b")
        with pytest.raises(NotPermitted, match=r"publish to a\.B"):
            await refused
        assert not other.done()
    assert len(requests) == 0
