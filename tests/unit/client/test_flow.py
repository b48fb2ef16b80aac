"""The short way of chunks that follow one another comes to the same as the long one."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inferbus.schemas import codec
from inferbus.schemas.answers import TokenChunk, Usage
from inferbus.workers.bus.connection.message import Message
from inferbus.workers.client.assembler import Assembler, Event
from inferbus.workers.client.deltas import to_answer
from inferbus.workers.client.flow import Flow
from inferbus.workers.client.messages import Chunk, ChunkMessage, EndMark, parse_message
from tests.support.answers import USAGE, pieces

KINDS = st.sampled_from([codec.JSON, codec.MSGPACK])
TEXTS = [piece.chunk for piece in pieces(1, ["a", "b", "c", "d", "e", "f"])]
ENDING = {"Infer-Status": "ok", "Infer-Attempt": "1"}


def tokens(count: int) -> list[Chunk]:
    """The chunks of an answer of tokens, of which the last reports the usage."""
    usage = Usage(prompt_tokens=1, completion_tokens=count, total_tokens=count + 1)
    return [
        TokenChunk(
            job="j",
            attempt=1,
            seq=seq,
            index=0,
            token_ids=[seq * 7],
            finish_reason="length" if seq == count - 1 else None,
            usage=usage if seq == count - 1 else None,
        )
        for seq in range(count)
    ]


def messages(chunks: Sequence[Chunk], kind: str) -> list[Message]:
    """As a worker would send them, with the end mark."""
    sent = [Message("inbox", codec.encode(chunk, kind)) for chunk in chunks]
    return [*sent, Message("inbox", b"", {**ENDING, "Infer-Chunks": str(len(sent))})]


class Reader:
    """Reads an answer as the client does."""

    def __init__(self, *, short: bool) -> None:
        self.assembler = Assembler()
        self.flow = Flow(self.assembler)
        self.events: deque[Event] = deque()
        self.flowed = 0
        self._short = short

    def read(self, arrived: Sequence[Message]) -> None:
        waiting: deque[Message | None] = deque(arrived)
        while waiting:
            before = len(self.events)
            if self._short and self.flow.take(waiting, self.events):
                self.flowed += len(self.events) - before
                continue
            message = waiting.popleft()
            assert message is not None
            parsed = parse_message(message.data, message.headers)
            assert isinstance(parsed, ChunkMessage | EndMark)
            self.events += self.assembler.take(parsed)
            if isinstance(parsed, ChunkMessage):
                self.flow.learn(message, parsed.chunk)


@given(data=st.data(), kind=KINDS, chunks=st.sampled_from([TEXTS, tokens(8)]))
@settings(max_examples=150)
def test_whatever_is_lost_doubled_or_late_the_reader_sees_the_same(
    data: st.DataObject, kind: str, chunks: list[Chunk]
) -> None:
    sent = messages(chunks, kind)
    cuts = sorted(data.draw(st.sets(st.integers(1, len(sent) - 1), max_size=4)))
    parts = [list(sent[a:b]) for a, b in itertools.pairwise([0, *cuts, len(sent)])]
    arrived = [each for part in data.draw(st.permutations(parts)) for each in part]
    arrived += data.draw(st.lists(st.sampled_from(sent), max_size=6))
    short, long = Reader(short=True), Reader(short=False)
    for at, _ in enumerate(arrived):
        for reader in (short, long):
            reader.read(arrived[at : at + 1])
        assert short.events == long.events
        assert short.assembler.missing == long.assembler.missing
        assert short.assembler.position == long.assembler.position
    assert short.assembler.final_status == long.assembler.final_status
    assert to_answer(short.assembler.delivered) == to_answer(long.assembler.delivered)


@pytest.mark.parametrize("chunks", [TEXTS, tokens(8)])
def test_all_but_the_first_chunk_and_the_usage_go_the_short_way(chunks: list[Chunk]) -> None:
    reader = Reader(short=True)
    reader.read(messages(chunks, codec.JSON))
    assert reader.flowed == len(chunks) - 2
    assert reader.assembler.final_status is not None
    assert reader.assembler.delivered.usage is not None


def test_what_a_reader_does_to_its_chunks_does_not_change_the_whole_answer() -> None:
    reader = Reader(short=True)
    reader.read(messages(TEXTS, codec.JSON))
    for event in reader.events:
        assert isinstance(event, dict)
        for choice in event["choices"]:
            choice["delta"].clear()
    answer = to_answer(reader.assembler.delivered)
    assert isinstance(answer, dict)
    assert answer["choices"][0]["message"]["content"] == "abcdef"
    assert answer["usage"] == USAGE


def test_what_is_of_another_job_has_other_headers_or_is_no_chunk_goes_the_long_way() -> None:
    first, second, *_ = tokens(4)
    assert isinstance(second, TokenChunk)
    strange = [
        Message("inbox", codec.encode(second).replace(b'"j"', b'"k"')),
        Message("inbox", codec.encode(second), {"Infer-Attempt": "1"}),
        Message("inbox", codec.encode({"error": {"code": "x"}, "job": "j", "attempt": 1})),
        Message("inbox", b"{"),
        Message("", b""),
    ]
    reader = Reader(short=True)
    reader.read([Message("inbox", codec.encode(first))])
    for message in strange:
        waiting: deque[Message | None] = deque([message])
        assert not reader.flow.take(waiting, reader.events)
        assert list(waiting) == [message]
