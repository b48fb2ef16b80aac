"""What the server has refused to this user.

NATS reports a permissions violation on the connection, with the subject, and not to whoever published.
"""

from __future__ import annotations

import re
from typing import Final, Literal

import msgspec

Action = Literal["publish", "subscription"]

REMEMBERED: Final = 1024
"""Refusals kept; a caller may choose subjects at random."""

_VIOLATION: Final = re.compile(
    r'permissions violation for (?P<action>publish|subscription) to "(?P<subject>[^"]+)"', re.IGNORECASE
)


class Refusal(msgspec.Struct, frozen=True):
    """One action on one subject; nats-py gives the server's text in lower case, so case is ignored."""

    action: Action
    subject: str


class Permissions:
    """The refusals of one connection; a server that reloads its permissions makes a new one."""

    def __init__(self) -> None:
        self._refusals: set[Refusal] = set()

    def add(self, refusal: Refusal) -> bool:
        """Remembers a refusal; whether it is new."""
        if refusal in self._refusals or len(self._refusals) >= REMEMBERED:
            return False
        self._refusals.add(refusal)
        return True

    def clear(self) -> None:
        """Forgets all: this is a new connection."""
        self._refusals.clear()

    def allow_subscription(self, subject: str) -> None:
        """Forgets a refusal, before the subject is subscribed to once more."""
        self._refusals.discard(Refusal("subscription", subject.lower()))

    def may_subscribe(self, subject: str) -> bool:
        """Whether a subscription to it was not refused."""
        return Refusal("subscription", subject.lower()) not in self._refusals

    def may_publish(self, subject: str) -> bool:
        """Whether no publish to it was refused; with wildcards, to no subject that it matches."""
        subject = subject.lower()
        if "*" not in subject and ">" not in subject:
            return Refusal("publish", subject) not in self._refusals
        return not any(
            refusal.action == "publish" and _matches(subject, refusal.subject) for refusal in self._refusals
        )


def parse_refusal(error: str) -> Refusal | None:
    """The refusal in the text of an error of the server; None for any other error."""
    match = _VIOLATION.search(error)
    if match is None:
        return None
    action: Action = "publish" if match["action"].lower() == "publish" else "subscription"
    return Refusal(action, match["subject"].lower())


def _matches(pattern: str, subject: str) -> bool:
    wanted, tokens = pattern.split("."), subject.split(".")
    if wanted[-1] == ">":
        wanted.pop()
        if len(tokens) <= len(wanted):
            return False
        tokens = tokens[: len(wanted)]
    return len(wanted) == len(tokens) and all(
        want in ("*", token) for want, token in zip(wanted, tokens, strict=True)
    )
