"""Which configurations are as strong as another."""

from __future__ import annotations

from typing import Any

import pytest

from inferbus.schemas.subjects import Subjects
from inferbus.workers.bus.jetstream.differences import CHECKS, differences, strengthened
from inferbus.workers.bus.jetstream.layout import job_consumer, stream_configs
from inferbus.workers.config import StreamSettings

DAY = 86_400_000_000_000


@pytest.mark.parametrize(
    ("wanted", "found"),
    [
        ({"max_age": DAY}, {"max_age": DAY}),
        ({"max_age": DAY}, {"max_age": 2 * DAY}),
        ({"max_age": DAY}, {}),
        ({"max_bytes": 10}, {"max_bytes": -1}),
        ({"max_bytes": -1}, {"max_bytes": -1}),
        ({"storage": "memory"}, {"storage": "file"}),
        ({"num_replicas": 1}, {"num_replicas": 3}),
        ({"subjects": ["a"]}, {"subjects": ["a", "b"]}),
        ({"ack_wait": 10}, {"ack_wait": 20}),
    ],
)
def test_at_least_as_strong(wanted: dict[str, Any], found: dict[str, Any]) -> None:
    assert differences(wanted, found) == []
    assert strengthened(wanted, found) == found


@pytest.mark.parametrize(
    ("wanted", "found", "message"),
    [
        ({"max_age": 0}, {"max_age": DAY}, "max_age is 86400 s, wanted unlimited"),
        ({"max_age": 2 * DAY}, {"max_age": DAY}, "max_age is 86400 s, wanted 172800 s"),
        ({"max_bytes": -1}, {"max_bytes": 10}, "max_bytes is 10, wanted unlimited"),
        ({"storage": "file"}, {"storage": "memory"}, "storage is memory, wanted file"),
        ({"num_replicas": 3}, {"num_replicas": 1}, "num_replicas is 1, wanted 3"),
        ({"allow_direct": True}, {}, "allow_direct is off, wanted on"),
        ({"max_deliver": -1}, {"max_deliver": 5}, "max_deliver is 5, wanted unlimited"),
        ({"max_msgs_per_subject": 1}, {"max_msgs_per_subject": -1}, "is unlimited, wanted 1"),
        ({"filter_subject": "a"}, {"filter_subject": "b"}, "filter_subject is b, wanted a"),
    ],
)
def test_weaker(wanted: dict[str, Any], found: dict[str, Any], message: str) -> None:
    [difference] = differences(wanted, found)
    assert message in difference
    assert differences(wanted, strengthened(wanted, found)) == []


def test_subjects_are_added_not_replaced() -> None:
    assert strengthened({"subjects": ["b"]}, {"subjects": ["a"]}) == {"subjects": ["a", "b"]}


def test_every_field_that_we_set_is_compared_or_left_to_the_operator_on_purpose() -> None:
    left = {"name", "durable_name", "replay_policy", "deny_delete", "persist_mode"}
    configs = [
        *stream_configs(Subjects(), StreamSettings()),
        job_consumer(Subjects(), "m", "batch", ack_wait=1),
    ]
    for config in configs:
        assert set(config) <= set(CHECKS) | left
