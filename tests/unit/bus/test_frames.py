"""Messages as bytes: nothing that is not a message may come out."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inferbus.schemas.errors import InvalidSubject, PayloadTooLarge
from inferbus.workers.bus.connection import frames
from inferbus.workers.bus.connection.frames import (
    check_filter,
    check_subject,
    header_block,
    payload_size,
    publish_frame,
)


def test_a_message_without_headers() -> None:
    assert publish_frame("a.b", b"data", None, "", 100) == b"PUB a.b 4\r\ndata\r\n"
    assert publish_frame("a.b", b"", {}, "r.1", 100) == b"PUB a.b r.1 0\r\n\r\n"
    assert payload_size(publish_frame("a.b", b"data", None, "", 100)) == 4


def test_a_message_with_headers() -> None:
    frame = publish_frame("a", b"data", {"K": "v", "X-Y": "ü"}, "r", 100)
    block = "NATS/1.0\r\nK: v\r\nX-Y: ü\r\n\r\n".encode()
    assert frame == b"HPUB a r %d %d\r\n%bdata\r\n" % (len(block), len(block) + 4, block)


@given(st.text(max_size=40))
def test_any_text_is_a_subject_of_printable_tokens_or_refused(text: str) -> None:
    try:
        raw = check_subject(text)
    except InvalidSubject:
        return
    assert raw.decode() == text
    assert re.fullmatch(r"[!-~]+", text)
    assert all(text.split("."))
    assert "*" not in text
    assert ">" not in text


@given(st.text(max_size=40), st.text(max_size=40), st.binary(max_size=40))
def test_whatever_the_headers_a_frame_is_one_command_of_the_size_it_says(
    key: str, value: str, data: bytes
) -> None:
    try:
        frame = publish_frame("a.b", data, {key: value}, "", 1000)
    except InvalidSubject:
        return
    line, _, rest = frame.partition(b"\r\n")
    found = re.fullmatch(rb"HPUB a\.b (\d+) (\d+)", line)
    assert found is not None
    header, total = int(found[1]), int(found[2])
    assert len(rest) == total + 2
    assert payload_size(frame) == total
    assert rest[header:] == data + b"\r\n"
    block = rest[:header]
    assert block.startswith(b"NATS/1.0\r\n")
    assert block.endswith(b"\r\n\r\n")
    # One header, whatever its value holds.
    assert block.count(b"\r\n") == 3
    assert b"\n" not in block.replace(b"\r\n", b"")


def test_the_limit_is_for_headers_and_body_together() -> None:
    assert publish_frame("a", b"x" * 100, None, "", 100)
    with pytest.raises(PayloadTooLarge):
        publish_frame("a", b"x" * 101, None, "", 100)
    block = header_block({"K": "v"})
    assert publish_frame("a", b"x" * (100 - len(block)), {"K": "v"}, "", 100)
    with pytest.raises(PayloadTooLarge, match="101 bytes with its headers; the server takes 100"):
        publish_frame("a", b"x" * (101 - len(block)), {"K": "v"}, "", 100)


@pytest.mark.parametrize("subject", ["a", "a.*", "*", ">", "a.>", "a.*.b.>", "$SRV.PING", "_INBOX.x.*"])
def test_what_can_be_subscribed_to(subject: str) -> None:
    assert check_filter(subject) == subject


@pytest.mark.parametrize("subject", ["", "a..b", ".a", "a.", "a.>.b", "a b", "a\r\n", "ab*", "a>", "ü"])
def test_what_cannot_be_subscribed_to(subject: str) -> None:
    with pytest.raises(InvalidSubject):
        check_filter(subject)


def test_what_is_remembered_of_subjects_and_headers_does_not_grow_without_end() -> None:
    for number in range(3 * frames._CACHED):
        check_subject(f"a.{number}")
        header_block({f"K-{number}": "v"})
    assert len(frames._known) <= frames._CACHED
    assert len(frames._known_keys) <= frames._CACHED
    assert len(frames._known_blocks) <= frames._CACHED
