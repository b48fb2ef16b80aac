"""Bodies over the server's payload limit, in real streams."""

from __future__ import annotations

import os

import pytest

from inferbus.schemas import limits
from inferbus.schemas.errors import BusUnavailable, InvalidRequest, PayloadTooLarge
from inferbus.schemas.objects import OBJECT, parse_object
from inferbus.workers.bus.connection.bus import Bus
from inferbus.workers.bus.jetstream import layout, objects
from inferbus.workers.bus.jetstream.client import JetStream
from inferbus.workers.bus.jetstream.objects import Objects


@pytest.mark.parametrize("size", [0, 1, objects.PART, objects.PART + 1, 5 * objects.PART - 1])
async def test_a_body_of_any_size_is_fetched_as_it_was_stored(streams: Bus, size: int) -> None:
    body = os.urandom(size)
    reference = await Objects(streams).store("acme", body)
    named = parse_object({OBJECT: str(reference)})
    assert named == reference
    assert await Objects(streams).fetch("acme", reference) == body


async def test_a_removed_body_leaves_nothing(streams: Bus) -> None:
    kept = await Objects(streams).store("acme", b"kept")
    removed = await Objects(streams).store("acme", b"x" * (2 * objects.PART))
    await Objects(streams).remove("acme", removed)
    assert len(await JetStream(streams).read(layout.OBJECTS, "infer.objects.>")) == kept.parts
    with pytest.raises(InvalidRequest, match="not stored any more"):
        await Objects(streams).fetch("acme", removed)


async def test_a_body_that_was_changed_is_refused(streams: Bus) -> None:
    reference = await Objects(streams).store("acme", b"one")
    await JetStream(streams).store(streams.subjects.object("acme", reference.id, 0), b"two")
    with pytest.raises(InvalidRequest, match="announced"):
        await Objects(streams).fetch("acme", reference)


async def test_a_body_over_the_limit_is_refused_before_anything_is_stored(
    streams: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(objects, "OBJECT_BYTES", 10)
    with pytest.raises(PayloadTooLarge, match="at most 10 bytes"):
        await Objects(streams).store("acme", b"x" * 11)
    assert not await JetStream(streams).read(layout.OBJECTS, "infer.objects.>")


async def test_without_the_stream_the_error_names_it(bus: Bus) -> None:
    with pytest.raises(BusUnavailable, match="INFER_OBJECTS"):
        await Objects(bus).store("acme", b"x")


@pytest.mark.parametrize("text", ["", "x", f"{'a' * 32} 0 1 {'0' * 64}", f"{'a' * 32} 5 1 {'0' * 64}"])
def test_a_reference_that_describes_no_object_is_refused(text: str) -> None:
    with pytest.raises(InvalidRequest, match=r"Infer-Object|bytes"):
        parse_object({OBJECT: text})


def test_a_reference_to_more_than_the_limit_is_refused() -> None:
    text = f"{'a' * 32} 1 {limits.OBJECT_BYTES + 1} {'0' * 64}"
    with pytest.raises(InvalidRequest, match="at most"):
        parse_object({OBJECT: text})
