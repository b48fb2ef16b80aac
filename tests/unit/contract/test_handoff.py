"""Hand-offs: prefill takes them from peers, and trusts none with an id that could end others' work."""

from __future__ import annotations

from typing import Any

import pytest

from inferbus.schemas import codec
from inferbus.schemas.errors import InvalidRequest
from inferbus.schemas.fleet import Signature
from inferbus.schemas.handoff import Abort, Done, FromPrefill, Prefill, ToPrefill, Transfer

RID = "0123456789abcdef" * 2
SIGNATURE = Signature(
    model="m",
    dtype="float32",
    kv_dtype="float32",
    page_size=1,
    layers=2,
    kv_heads=2,
    head_dim=32,
    tp=1,
    dp=1,
    pp=1,
    backend="nixl",
)
PREFILL = Prefill(
    rid=RID,
    room=2**63 - 1,
    token_ids=[1, 2],
    sampling={"temperature": 0.0},
    worker="d1",
    job="j1",
    signature=SIGNATURE,
    timeout=30.0,
)


def sent(message: Any) -> Any:
    return codec.decode(codec.encode(message, codec.MSGPACK), ToPrefill, codec.MSGPACK)  # type: ignore[arg-type]


def test_a_hand_off_survives_the_wire() -> None:
    assert sent(PREFILL) == PREFILL
    assert sent(Abort(rid=RID)) == Abort(rid=RID)


def test_a_transfer_s_figures_travel_with_the_end_of_a_hand_off() -> None:
    done = Done(worker="p1", transfer=Transfer(seconds=0.25, bytes=4096))
    assert codec.decode(codec.encode(done, codec.MSGPACK), FromPrefill, codec.MSGPACK) == done  # type: ignore[arg-type]


def test_a_peer_that_knows_no_transfer_figures_is_read_and_can_read() -> None:
    old = {"type": "done", "worker": "p1", "seconds": 0.5}
    read: FromPrefill = codec.decode(codec.encode(old, codec.MSGPACK), FromPrefill, codec.MSGPACK)  # type: ignore[arg-type]
    assert read == Done(worker="p1", seconds=0.5)
    # What a peer does not know it passes over; without figures nothing is added at all.
    assert codec.decode(codec.encode(read, codec.MSGPACK), dict, codec.MSGPACK) == old
    newer = old | {"transfer": {"seconds": 1.0, "bytes": 2, "more": 3}, "other": 4}
    read = codec.decode(codec.encode(newer, codec.MSGPACK), FromPrefill, codec.MSGPACK)  # type: ignore[arg-type]
    assert read == Done(worker="p1", seconds=0.5, transfer=Transfer(seconds=1.0, bytes=2))


@pytest.mark.parametrize("rid", ["", "0", RID[:-1], RID + "0", RID + "\n", RID.upper(), "*" * 32])
def test_an_id_of_another_length_or_alphabet_is_refused(rid: str) -> None:
    """SGLang aborts every request whose id begins with the one given: an empty one would end them all."""
    with pytest.raises(InvalidRequest) as caught:
        sent(Abort(rid=rid))
    assert caught.value.param == "rid"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("room", -1),
        ("room", 2**63),
        ("token_ids", []),
        ("token_ids", [-1]),
        ("timeout", 0.0),
        ("timeout", float("nan")),
    ],
)
def test_a_hand_off_out_of_range_is_refused(field: str, value: Any) -> None:
    changed = codec.decode(codec.encode(PREFILL, codec.MSGPACK), dict, codec.MSGPACK) | {field: value}
    with pytest.raises(InvalidRequest) as caught:
        sent(changed)
    assert (caught.value.param or "").startswith(field)
