"""The secret entrances of streams that only workers write to.

JetStream acknowledges a message to any reply subject that it names, and answers a direct get there as well,
with the server's own rights. A stream that captured the subjects which its readers know would store what the
server sends there on behalf of a client that may not publish to them. So these streams capture
`<prefix>.in.<key>.<family>.>` and transform it to `<prefix>.<family>.>`. The key is random and stands in the
stream's configuration alone, which workers may read and clients may not. What is stored is published again on
the subject that readers know, so that subscribers still hear it. The bucket of API
keys has an entrance as well: operators write it.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Sequence
from typing import Any, Final

import msgspec

from inferbus.schemas.subjects import Subjects

_KEY_BYTES: Final = 16
_KEY: Final = re.compile(r"\.in\.([0-9a-f]{32})\.")


class Entrance(msgspec.Struct, frozen=True):
    """How a stream is written to.

    Attributes:
        source: What a captured subject begins with, up to the family.
        target: What a stored subject begins with in its place.
    """

    source: str
    target: str

    def subject(self, known: str) -> str:
        """Where to publish what is to be stored on a subject that readers know."""
        return self.source + known.removeprefix(self.target)


def guarded(config: dict[str, Any], subjects: Subjects, families: Sequence[str]) -> dict[str, Any]:
    """A stream's configuration with an entrance of its own; subscribers hear the first of the families."""
    source, target = f"{subjects.prefix}.in.{secrets.token_hex(_KEY_BYTES)}.", f"{subjects.prefix}."
    heard = f"{target}{families[0]}.>"
    return config | {
        "subjects": [f"{source}{family}.>" for family in families],
        "subject_transform": {"src": f"{source}>", "dest": f"{target}>"},
        "republish": {"src": heard, "dest": heard},
    }


def guarded_bucket(config: dict[str, Any], subjects: Subjects, keys: str) -> dict[str, Any]:
    """The same for a key-value bucket, which readers know by its own subjects.

    Args:
        config: Of the stream behind the bucket.
        subjects: With the prefix.
        keys: All keys of the bucket, as a subject (ADR-8).
    """
    source = f"{subjects.prefix}.in.{secrets.token_hex(_KEY_BYTES)}.keys.>"
    return config | {
        "subjects": [source],
        "subject_transform": {"src": source, "dest": keys},
        "republish": {"src": keys, "dest": keys},
    }


def entrance(config: dict[str, Any]) -> Entrance | None:
    """The entrance of a stream by its configuration; None: it captures the subjects that readers know."""
    transform = config.get("subject_transform") or {}
    source, target = transform.get("src", ""), transform.get("dest", "")
    if not _KEY.search(source):
        return None
    return Entrance(source.removesuffix(">"), target.removesuffix(">"))


def with_key_of(wanted: dict[str, Any], existing: dict[str, Any]) -> dict[str, Any]:
    """A wanted configuration with the key of a stream that is there, so that the two can be compared."""
    ours, theirs = entrance(wanted), entrance(existing)
    if ours is None or theirs is None or masked(ours.source) != masked(theirs.source):
        return wanted
    return wanted | {
        "subjects": [each.replace(ours.source, theirs.source) for each in wanted["subjects"]],
        "subject_transform": wanted["subject_transform"] | {"src": f"{theirs.source}>"},
    }


def masked(subject: str) -> str:
    """A subject as it may be shown or logged: without the key."""
    return _KEY.sub(".in.*.", subject)
