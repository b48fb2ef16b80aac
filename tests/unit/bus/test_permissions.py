"""What the server has refused, and what follows from it."""

from __future__ import annotations

import pytest

from inferbus.workers.bus.connection.permissions import REMEMBERED, Permissions, Refusal, parse_refusal


@pytest.mark.parametrize(
    ("text", "refusal"),
    [
        (
            "nats: 'permissions violation for publish to \"infer.jobs.m\"'",
            Refusal("publish", "infer.jobs.m"),
        ),
        ('Permissions Violation for Publish to "infer.Jobs"', Refusal("publish", "infer.jobs")),
        (
            'permissions violation for subscription to "a.>" using queue "q"',
            Refusal("subscription", "a.>"),
        ),
        ("authorization violation", None),
    ],
)
def test_a_refusal_is_read_from_the_servers_error(text: str, refusal: Refusal | None) -> None:
    assert parse_refusal(text) == refusal


@pytest.mark.parametrize(
    ("subject", "may"),
    [
        ("infer.alive.live.j1", False),
        ("infer.alive.live.J1", False),
        ("infer.alive.live.j2", True),
        ("infer.alive.live.*", False),
        ("infer.alive.>", False),
        ("infer.*.live.*", False),
        ("infer.alive.*", True),
        ("infer.alive.live.j1.>", True),
        ("infer.cancel.live.*", True),
    ],
)
def test_a_subject_or_a_family_of_them_may_be_published_to_until_one_was_refused(
    subject: str, may: bool
) -> None:
    permissions = Permissions()
    assert permissions.may_publish(subject)
    permissions.add(Refusal("publish", "infer.alive.live.j1"))
    assert permissions.may_publish(subject) is may
    permissions.clear()
    assert permissions.may_publish(subject)


def test_a_refused_subscription_may_be_tried_again_and_says_nothing_of_publishing() -> None:
    permissions = Permissions()
    permissions.add(Refusal("subscription", "a.b"))
    assert not permissions.may_subscribe("a.B")
    assert permissions.may_publish("a.b")
    permissions.allow_subscription("a.b")
    assert permissions.may_subscribe("a.b")


def test_a_refusal_is_new_once_and_their_number_is_bounded() -> None:
    permissions = Permissions()
    assert permissions.add(Refusal("publish", "a"))
    assert not permissions.add(Refusal("publish", "a"))
    added = [permissions.add(Refusal("publish", f"a.{number}")) for number in range(2 * REMEMBERED)]
    assert added.count(True) == REMEMBERED - 1
