"""Content types, typed decoding, and what of msgspec's messages is repeated."""

from __future__ import annotations

from contextlib import suppress
from typing import Literal

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from inferbus.schemas import codec
from inferbus.schemas.answers import TokenChunk
from inferbus.schemas.errors import ErrorAnswer, InvalidRequest, UndecodableBody, UnsupportedContentType
from inferbus.schemas.fleet import WorkerInfo
from inferbus.schemas.handoff import FromPrefill, ToPrefill


@pytest.mark.parametrize(
    ("header", "kind"),
    [
        (None, codec.JSON),
        ("", codec.JSON),
        ("application/json; charset=utf-8", codec.JSON),
        (" Application/JSON ", codec.JSON),
        ("application/msgpack", codec.MSGPACK),
        ("application/x-msgpack", codec.MSGPACK),
    ],
)
def test_content_types_are_recognised(header: str | None, kind: str) -> None:
    assert codec.content_type(header) == kind


@pytest.mark.parametrize("header", ["text/plain", "application/jsonx", ";", "json", "\r\n"])
def test_another_content_type_is_refused(header: str) -> None:
    if header.strip() in ("", ";"):
        assert codec.content_type(header) == codec.JSON
        return
    with pytest.raises(UnsupportedContentType) as caught:
        codec.content_type(header)
    assert caught.value.param == "Content-Type"


@pytest.mark.parametrize("kind", [codec.JSON, codec.MSGPACK])
def test_an_object_is_read_without_its_content_type(kind: str) -> None:
    body = {"seq": 1, "text": "ä"}
    assert codec.decode_any(codec.encode(body, kind)) == body


@pytest.mark.parametrize("data", [b"", b"{", b"\xc1", b'{"\xff": 1}'])
def test_what_is_of_neither_content_type_is_refused(data: bytes) -> None:
    with pytest.raises(UndecodableBody):
        codec.decode_any(data)


class Pick(msgspec.Struct):
    side: Literal["left", "right"]


def test_a_message_does_not_repeat_the_value_that_was_wrong() -> None:
    with pytest.raises(InvalidRequest) as caught:
        codec.decode(b'{"side":"hunter2 - at `$.x`"}', Pick)
    assert "hunter2" not in caught.value.message
    assert caught.value.param == "side"


def test_a_message_of_an_unknown_tag_does_not_repeat_it() -> None:
    with pytest.raises(InvalidRequest) as caught:
        codec.decode(b'{"type":"hunter2"}', ToPrefill)  # type: ignore[arg-type]
    assert "hunter2" not in caught.value.message


@pytest.mark.parametrize("kind", [codec.JSON, codec.MSGPACK])
def test_a_struct_survives_both_content_types(kind: str) -> None:
    chunk = TokenChunk(job="j", attempt=1, seq=0, index=0, token_ids=[1, 2], finish_reason="stop", matched=2)
    assert codec.decode(codec.encode(chunk, kind), TokenChunk, kind) == chunk


@pytest.mark.parametrize("kind", [codec.JSON, codec.MSGPACK])
def test_deep_nesting_is_undecodable(kind: str) -> None:
    with pytest.raises(UndecodableBody):
        codec.decode((b"[" if kind == codec.JSON else b"\x91") * 100_000, list, kind)


@given(
    st.binary(max_size=100),
    st.sampled_from([codec.JSON, codec.MSGPACK]),
    st.sampled_from([ToPrefill, FromPrefill, TokenChunk, ErrorAnswer, WorkerInfo]),
)
def test_arbitrary_bytes_never_raise_outside_the_error_tree(data: bytes, kind: str, target: type) -> None:
    with suppress(UndecodableBody, InvalidRequest):
        codec.decode(data, target, kind)
