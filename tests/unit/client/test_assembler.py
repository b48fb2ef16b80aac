"""What a user sees of an answer, whatever became of its messages on the way."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inferbus.schemas.answers import TokenAnswer, TokenChoice, TokenChunk, TokenLogprobs, Usage
from inferbus.schemas.errors import BusUnavailable, Cancelled, InvalidRequest
from inferbus.schemas.headers import Continuation
from inferbus.workers.client.assembler import Assembler, Event, Restarted
from inferbus.workers.client.deltas import to_answer
from inferbus.workers.client.messages import AnswerMessage, ChunkMessage, ErrorMessage, Result, WholeMessage
from tests.support.answers import USAGE, chat, chat_answer, end, pieces, result, seen


def feed(assembler: Assembler, messages: Sequence[AnswerMessage]) -> list[Event]:
    return [event for message in messages for event in assembler.take(message)]


def over(assembler: Assembler) -> bool:
    return assembler.final_status is not None


def restarts(events: list[Event]) -> int:
    return sum(isinstance(event, Restarted) for event in events)


def test_chunks_come_out_as_they_come_in() -> None:
    assembler = Assembler()
    sent = pieces(1, ["The ", "end"])
    for piece in sent:
        assert assembler.take(piece) == [piece.chunk]
    assert not over(assembler)
    assert assembler.take(end(1, len(sent))) == []
    final_status = assembler.final_status
    assert final_status is not None
    assert (final_status.status, final_status.worker, final_status.prefill_worker) == ("ok", "d1", "p1")
    assert assembler.delivered.usage == USAGE


def test_a_doubled_chunk_is_given_once() -> None:
    assembler = Assembler()
    sent = pieces(1, ["a", "b"])
    events = feed(assembler, [sent[0], sent[1], sent[1], sent[0], sent[2]])
    assert seen(events) == "ab"


def test_a_gap_holds_back_what_follows_until_it_is_filled() -> None:
    assembler = Assembler()
    sent = pieces(1, ["a", "b", "c"])
    assert seen(feed(assembler, [sent[0], sent[1], sent[3]])) == "a"
    assert assembler.missing
    assert seen(assembler.take(sent[2])) == "bc"
    assert not assembler.missing


def test_a_lost_tail_is_noticed_from_the_count_on_the_end_mark() -> None:
    assembler = Assembler()
    sent = pieces(1, ["a", "b"])
    feed(assembler, [*sent[:-1], end(1, len(sent))])
    assert assembler.final_status is None
    assert assembler.missing
    feed(assembler, [sent[-1]])
    assert assembler.final_status is not None


def test_an_end_mark_may_overtake_chunks() -> None:
    assembler = Assembler()
    sent = pieces(1, ["a", "b"])
    assert seen(feed(assembler, [end(1, len(sent)), *sent])) == "ab"
    assert assembler.final_status is not None


def test_a_continuation_goes_on_without_a_trace() -> None:
    assembler = Assembler()
    first = pieces(1, ["a", "b", "c"])[:3]
    second = pieces(2, ["c", "d"], continues=Continuation(1, 3), role=False)
    events = feed(assembler, [*first, *second, end(2, len(second))])
    assert seen(events) == "abcd"
    assert restarts(events) == 0
    assert [event["seq"] for event in events if isinstance(event, dict)] == list(range(len(events)))


def test_what_a_stalled_owner_sent_after_its_successor_looked_is_not_repeated() -> None:
    assembler = Assembler()
    first = pieces(1, ["a", "b", "cd", "e"])[:4]
    second = pieces(2, ["c", "d", "e", "f"], continues=Continuation(1, 3), role=False)
    events = feed(assembler, [*first, *second, end(2, len(second))])
    assert seen(events) == "abcdef"
    assert restarts(events) == 0


def test_a_stalled_owner_is_not_heard_once_its_successor_speaks() -> None:
    assembler = Assembler()
    first = pieces(1, ["a", "X", "Y"])
    second = pieces(2, ["b"], continues=Continuation(1, 2), role=False)
    events = feed(assembler, [*first[:2], *second[:1], *first[2:], *second[1:], end(2, len(second))])
    assert seen(events) == "ab"


def test_a_continuation_waits_for_the_chunks_it_builds_on() -> None:
    assembler = Assembler()
    first = pieces(1, ["a", "b"])[:3]
    second = pieces(2, ["c"], continues=Continuation(1, 3), role=False)
    assert seen(feed(assembler, [*first[:2], *second])) == "a"
    assert assembler.missing
    assert seen(assembler.take(first[2])) == "bc"


def test_a_third_owner_continues_a_continuation() -> None:
    assembler = Assembler()
    first = pieces(1, ["a", "b"])[:3]
    second = pieces(2, ["c", "d"], continues=Continuation(1, 3), role=False)[:1]
    third = pieces(3, ["d"], continues=Continuation(2, 1), role=False)
    events = feed(assembler, [*first, *second, *third, end(3, len(third))])
    assert seen(events) == "abcd"
    assert restarts(events) == 0


def test_a_restart_that_says_the_same_is_hidden() -> None:
    assembler = Assembler()
    second = pieces(2, ["Hel", "lo wor", "ld"])
    events = feed(assembler, [*pieces(1, ["H", "ello"])[:3], *second, end(2, len(second))])
    assert seen(events) == "Hello world"
    assert restarts(events) == 0
    roles = [event for event in events if isinstance(event, dict) and "role" in str(event["choices"])]
    assert len(roles) == 1


def test_a_restart_that_says_something_else_tells_the_user_to_forget() -> None:
    assembler = Assembler()
    second = pieces(2, ["Hel", "p!"])
    events = feed(assembler, [*pieces(1, ["H", "ello"])[:3], *second, end(2, len(second))])
    assert seen(events) == "Help!"
    assert [event for event in events if isinstance(event, Restarted)] == [Restarted(2)]
    after = events[events.index(Restarted(2)) + 1 :]
    assert [event["seq"] for event in after if isinstance(event, dict)] == list(range(len(after)))


def test_a_restart_that_says_less_tells_the_user_to_forget() -> None:
    assembler = Assembler()
    second = pieces(2, ["Hel"])
    events = feed(assembler, [*pieces(1, ["Hello"])[:2], *second, end(2, len(second))])
    assert seen(events) == "Hel"
    assert restarts(events) == 1


def test_an_attempt_that_ends_before_it_repeats_all_is_another_answer() -> None:
    """Even where no finish reason says so: the end mark does."""
    assembler = Assembler()
    second = pieces(2, ["Hel"])[:2]
    events = feed(assembler, [*pieces(1, ["Hello"])[:2], *second, end(2, len(second))])
    assert seen(events) == "Hel"
    assert assembler.final_status is not None


def test_the_result_gives_what_is_missing_and_nothing_twice() -> None:
    assembler = Assembler()
    sent = pieces(1, ["The ", "end", " is near"])
    events = feed(assembler, [sent[0], sent[1], sent[3]])
    events += assembler.finish(result("The end is near"))
    assert seen(events) == "The end is near"
    assert restarts(events) == 0
    assert assembler.delivered.usage == USAGE
    final_status = assembler.final_status
    assert final_status is not None
    assert final_status.worker == "d1"


@pytest.mark.parametrize("heard", [0, 2])
def test_the_result_says_nothing_of_a_usage_that_the_chunks_were_not_to_report(heard: int) -> None:
    assembler = Assembler()
    events = feed(assembler, pieces(1, ["The ", "end"])[:heard])
    events += assembler.finish(msgspec.structs.replace(result("The end"), usage=False))
    assert seen(events) == "The end"
    assert all(event["choices"] for event in events if isinstance(event, dict))
    assert assembler.delivered.usage == USAGE


def test_the_result_of_an_attempt_nobody_heard_replaces_what_was_given() -> None:
    assembler = Assembler()
    events = feed(assembler, pieces(2, ["The", " cat"])[:3])
    events += assembler.finish(result("The end", attempt=1))
    assert seen(events) == "The end"
    assert restarts(events) == 1


def test_the_end_mark_of_an_older_attempt_says_that_the_result_decides() -> None:
    assembler = Assembler()
    feed(assembler, [*pieces(1, ["a"])[:1], *pieces(2, ["b"])[:1]])
    assert not assembler.older_attempt_ended
    feed(assembler, [end(1, 4)])
    assert assembler.older_attempt_ended


def test_an_answer_in_one_piece_needs_no_end_mark_to_be_complete() -> None:
    assembler = Assembler()
    events = assembler.take(WholeMessage(attempt=1, answer=chat_answer("Hi")))
    assert seen(events) == "Hi"
    assert assembler.complete
    assert not over(assembler)
    feed(assembler, [WholeMessage(attempt=1, answer=chat_answer("Hi")), end(1, 1)])
    assert over(assembler)
    assert to_answer(assembler.delivered) == chat_answer("Hi")


def test_an_error_is_the_answer_once_its_end_mark_is_there() -> None:
    assembler = Assembler()
    error = InvalidRequest("top_p must be at most 1", param="top_p")
    assembler.take(ErrorMessage(attempt=1, error=error))
    assert assembler.complete
    assembler.take(end(1, 1, "error"))
    assert assembler.final_status is not None
    assert assembler.final_status.error is error


def test_an_error_without_a_responder_is_final_at_once() -> None:
    assembler = Assembler()
    assembler.take(ErrorMessage(attempt=1, error=BusUnavailable("x"), final=True))
    assert assembler.final_status is not None


def test_a_lost_error_message_is_noticed() -> None:
    assembler = Assembler()
    assembler.take(end(1, 1, "error"))
    assert assembler.final_status is None
    assert assembler.missing


@pytest.mark.parametrize("status", ["cancelled", "expired"])
def test_a_cancel_or_a_deadline_needs_no_message_beside_its_end_mark(status: str) -> None:
    assembler = Assembler()
    sent = pieces(1, ["a", "b"])[:2]
    assert seen(feed(assembler, [*sent, end(1, 2, status)])) == "a"
    final_status = assembler.final_status
    assert final_status is not None
    assert final_status.status == status
    assert final_status.error is not None


def test_an_error_of_a_superseded_attempt_is_nobodys_concern() -> None:
    assembler = Assembler()
    second = pieces(2, ["a"])
    feed(assembler, [second[0], ErrorMessage(attempt=1, error=Cancelled("x"))])
    assert not assembler.complete
    assert seen(feed(assembler, [*second[1:], end(2, len(second))])) == "a"


def test_nothing_comes_after_the_outcome() -> None:
    assembler = Assembler()
    sent = pieces(1, ["a"])
    feed(assembler, [*sent, end(1, len(sent))])
    assert feed(assembler, pieces(2, ["b"])) == []
    assert assembler.finish(result("c")) == []


def test_tokens_are_trimmed_with_their_log_probabilities() -> None:
    def tokens(attempt: int, seq: int, ids: list[int], **more: Any) -> ChunkMessage:
        probabilities = TokenLogprobs(logprobs=[float(-i) for i in ids])
        chunk = TokenChunk(
            job="j", attempt=attempt, seq=seq, index=0, token_ids=ids, logprobs=probabilities, **more
        )
        return ChunkMessage(attempt=attempt, seq=seq, chunk=chunk)

    usage = Usage(prompt_tokens=1, completion_tokens=4, total_tokens=5)
    assembler = Assembler()
    events = feed(assembler, [tokens(1, 0, [1, 2]), tokens(1, 1, [3])])
    events += feed(
        assembler,
        [tokens(2, 0, [1]), tokens(2, 1, [2, 3, 4], finish_reason="stop", usage=usage), end(2, 2)],
    )
    chunks = [event for event in events if isinstance(event, TokenChunk)]
    assert [chunk.token_ids for chunk in chunks] == [[1, 2], [3], [4]]
    assert [chunk.logprobs and chunk.logprobs.logprobs for chunk in chunks] == [[-1, -2], [-3], [-4]]
    assert to_answer(assembler.delivered) == TokenAnswer(
        job="j",
        attempt=2,
        choices=[
            TokenChoice(
                index=0,
                token_ids=[1, 2, 3, 4],
                finish_reason="stop",
                logprobs=TokenLogprobs(logprobs=[-1, -2, -3, -4]),
            )
        ],
        usage=usage,
    )


def test_a_restart_with_another_tool_call_is_told() -> None:
    def call(identity: str) -> dict[str, Any]:
        function = {"name": "f", "arguments": "{}"}
        return {"tool_calls": [{"index": 0, "id": identity, "type": "function", "function": function}]}

    def piece(attempt: int, delta: dict[str, Any]) -> ChunkMessage:
        return ChunkMessage(attempt=attempt, seq=0, chunk=chat(delta))

    same, other = Assembler(), Assembler()
    assert restarts(feed(same, [piece(1, call("a")), piece(2, call("a"))])) == 0
    assert restarts(feed(other, [piece(1, call("a")), piece(2, call("b"))])) == 1


@st.composite
def split(draw: st.DrawFn, text: str) -> list[str]:
    """A text in pieces, as tokens would cut it."""
    cuts = sorted(draw(st.sets(st.integers(1, max(len(text) - 1, 1)), max_size=6)))
    edges = [0, *cuts, len(text)]
    return [text[start:stop] for start, stop in itertools.pairwise(edges)]


class Story:
    """A job's attempts: what each sent, and what the answer is."""

    def __init__(self, attempts: list[list[ChunkMessage]], text: str, *, greedy: bool) -> None:
        self.attempts = attempts
        self.text = text
        self.greedy = greedy
        self.messages: list[AnswerMessage] = [piece for attempt in attempts for piece in attempt]
        self.messages.append(end(len(attempts), len(attempts[-1])))

    def __repr__(self) -> str:
        sent = [[(p.attempt, p.seq, p.continues, p.chunk["choices"]) for p in a] for a in self.attempts]  # type: ignore[index]
        return f"Story({self.text!r}, greedy={self.greedy}, {sent})"


@st.composite
def stories(draw: st.DrawFn) -> Story:
    """Up to four attempts; each later one starts anew, or goes on after some of an earlier one's chunks."""
    greedy = draw(st.booleans())
    texts = st.text(st.sampled_from("abñ世"), min_size=1, max_size=12)
    same = draw(texts)
    attempts: list[list[ChunkMessage]] = []
    before: list[str] = []  # What the chunks that stand before each attempt say.
    count = draw(st.integers(1, 4))
    for number in range(1, count + 1):
        base, continues = "", None
        older = next((i for i in reversed(range(len(attempts))) if attempts[i]), None)
        if older is not None and draw(st.booleans()):
            kept = draw(st.integers(1, len(attempts[older])))
            base = before[older] + seen([piece.chunk for piece in attempts[older][:kept]])
            if any(finished(piece) for piece in attempts[older][:kept]):
                base = ""
            else:
                continues = Continuation(older + 1, kept)
        rest = same[len(base) :] if greedy else draw(texts)
        sent = pieces(number, draw(split(rest)), continues=continues, role=continues is None)
        if number < count:
            sent = sent[: draw(st.integers(0, len(sent)))]
        attempts.append(sent)
        before.append(base)
    text = before[-1] + seen([piece.chunk for piece in attempts[-1]])
    return Story(attempts, text, greedy=greedy)


def finished(piece: ChunkMessage) -> bool:
    assert isinstance(piece.chunk, dict)
    return any(choice["finish_reason"] for choice in piece.chunk["choices"]) or not piece.chunk["choices"]


def check(story: Story, assembler: Assembler, events: list[Event]) -> None:
    assert seen(events) == story.text
    assert assembler.final_status is not None
    assert assembler.final_status.status == "ok"
    answer = to_answer(assembler.delivered)
    assert isinstance(answer, dict)
    [choice] = answer["choices"]
    assert choice["message"]["content"] == story.text
    assert choice["finish_reason"] == "stop"
    assert answer["usage"] == USAGE
    if story.greedy:
        assert restarts(events) == 0
    last = max((i for i, event in enumerate(events) if isinstance(event, Restarted)), default=-1)
    final = events[last + 1 :]
    assert [event["seq"] for event in final if isinstance(event, dict)] == list(range(len(final)))
    finishes = [choice for event in final if isinstance(event, dict) for choice in event["choices"]]
    assert sum(choice["finish_reason"] is not None for choice in finishes) == 1


@given(data=st.data(), story=stories())
@settings(max_examples=200)
def test_any_loss_doubling_and_order_heals_from_the_stored_stream(data: st.DataObject, story: Story) -> None:
    arrived = data.draw(st.lists(st.sampled_from(story.messages), max_size=3 * len(story.messages)))
    assembler = Assembler()
    events = feed(assembler, arrived)
    events += feed(assembler, story.messages)
    check(story, assembler, events)


@given(data=st.data(), story=stories())
@settings(max_examples=200)
def test_what_no_stream_holds_any_more_comes_from_the_result(data: st.DataObject, story: Story) -> None:
    arrived = data.draw(st.lists(st.sampled_from(story.messages), max_size=3 * len(story.messages)))
    stored = data.draw(st.lists(st.sampled_from(story.messages), unique_by=id))
    assembler = Assembler()
    events = feed(assembler, [*arrived, *stored])
    events += assembler.finish(result(story.text, attempt=len(story.attempts)))
    check(story, assembler, events)


@given(story=stories())
@settings(max_examples=100)
def test_in_order_delivery_needs_no_healing(story: Story) -> None:
    assembler = Assembler()
    events: list[Event] = []
    for message in story.messages:
        events += assembler.take(message)
        assert not assembler.missing
    check(story, assembler, events)


@given(data=st.data(), story=stories())
@settings(max_examples=100)
def test_a_user_never_gets_more_than_a_beginning_of_some_attempt(data: st.DataObject, story: Story) -> None:
    """At no moment, not only at the end."""
    told = [
        "".join(seen([piece.chunk for piece in attempt[:n]]))
        for attempt in story.attempts
        for n in range(len(attempt) + 1)
    ]
    arrived = data.draw(st.permutations(story.messages))
    assembler = Assembler()
    events: list[Event] = []
    for message in arrived:
        events += assembler.take(message)
        if len(story.attempts) == 1:
            assert seen(events) in told
        if story.greedy:
            assert story.text.startswith(seen(events))


def test_a_result_that_is_an_error_ends_the_stream_with_it() -> None:
    assembler = Assembler()
    feed(assembler, pieces(1, ["a"])[:2])
    error = BusUnavailable("x")
    failed = Result(
        attempt=2, status="error", submission=1, worker="d", prefill_worker=None, answer=None, error=error
    )
    assert assembler.finish(failed) == []
    assert assembler.final_status is not None
    assert assembler.final_status.error is error
