"""Whether the configuration of an existing stream or consumer is at least as strong as the wanted one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from inferbus.workers.bus.durations import seconds
from inferbus.workers.bus.jetstream.entrance import masked, with_key_of

Check = Callable[[Any, Any], bool]


def _equal(existing: Any, wanted: Any) -> bool:
    return bool(existing == wanted)


def _at_least(existing: Any, wanted: Any) -> bool:
    """For limits, where -1 and 0 mean none."""
    return bool(existing in (-1, 0) or (wanted not in (-1, 0) and existing >= wanted))


def _not_below(existing: Any, wanted: Any) -> bool:
    """For plain numbers."""
    return bool(existing >= wanted)


def _covers(existing: Any, wanted: Any) -> bool:
    return set(wanted) <= set(existing or ())


def _equal_sets(existing: Any, wanted: Any) -> bool:
    return set(wanted) == set(existing or ())


def _no_sooner(existing: Any, wanted: Any) -> bool:
    """File instead of memory is fine."""
    return bool(existing in (wanted, "file"))


CHECKS: Final[dict[str, Check]] = {
    "subjects": _covers,
    "subject_transform": _equal,
    "republish": _equal,
    "retention": _equal,
    "storage": _no_sooner,
    "discard": _equal,
    "max_bytes": _at_least,
    "max_age": _at_least,
    "max_msgs": _at_least,
    "max_msgs_per_subject": _at_least,
    "discard_new_per_subject": _equal,
    "max_msg_size": _at_least,
    "max_consumers": _at_least,
    "num_replicas": _not_below,
    "duplicate_window": _not_below,
    "allow_direct": _equal,
    "allow_rollup_hdrs": _equal,
    "filter_subject": _equal,
    "deliver_policy": _equal,
    "ack_policy": _equal,
    "ack_wait": _not_below,
    "max_deliver": _at_least,
    "max_ack_pending": _at_least,
    "max_waiting": _not_below,
}
"""By field; fields that are not here are the operator's business (placement, description, compression, …)."""

_TIMES: Final = frozenset({"max_age", "duplicate_window", "ack_wait"})
_ABSENT: Final[dict[str, Any]] = {
    "allow_direct": False,
    "allow_rollup_hdrs": False,
    "discard_new_per_subject": False,
    "subjects": [],
    "subject_transform": None,
    "republish": None,
}
"""The server leaves these out when they are not set; numbers then are 0."""


def differences(wanted: dict[str, Any], existing: dict[str, Any]) -> list[str]:
    """The fields that are weaker than wanted, one text each."""
    wanted = with_key_of(wanted, existing)
    return [
        f"{field} is {_shown(field, _value(existing, field))}, wanted {_shown(field, wanted[field])}"
        for field in _weaker(wanted, existing)
    ]


def changes(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """The fields that a change of a configuration concerns, one text each."""
    return [
        f"{field} from {_shown(field, _value(before, field))} to {_shown(field, _value(after, field))}"
        for field in CHECKS
        if _value(before, field) != _value(after, field)
    ]


def strengthened(wanted: dict[str, Any], existing: dict[str, Any]) -> dict[str, Any]:
    """The existing configuration, with its weaker fields raised to the wanted values."""
    wanted = with_key_of(wanted, existing)
    raised = {field: wanted[field] for field in _weaker(wanted, existing)}
    if "subjects" in raised and "subject_transform" not in wanted:
        raised["subjects"] = [*existing.get("subjects", ()), *raised["subjects"]]
    return existing | raised


def _weaker(wanted: dict[str, Any], existing: dict[str, Any]) -> list[str]:
    checks = dict(CHECKS)
    # With one message per subject a stream keeps the newest one, and a limit per owner is to hold: a higher
    # value is not stronger.
    if wanted.get("max_msgs_per_subject") == 1 or wanted.get("discard_new_per_subject"):
        checks["max_msgs_per_subject"] = _equal
    if wanted.get("max_msg_size", -1) > 0:
        checks["max_msg_size"] = _equal
    # Chunks and announcements: several copies in memory outlive a server, as one on disk does.
    if wanted.get("persist_mode") == "async" and existing.get("num_replicas", 1) > 1:
        del checks["storage"]
    # A second subject would be a way around the entrance.
    if "subject_transform" in wanted:
        checks["subjects"] = _equal_sets
    return [
        field
        for field, check in checks.items()
        if field in wanted and not check(_value(existing, field), wanted[field])
    ]


def _value(existing: dict[str, Any], field: str) -> Any:
    return existing.get(field, _ABSENT.get(field, 0))


def _shown(field: str, value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(masked, value))
    if isinstance(value, dict):
        return f"{masked(value['src'])} to {masked(value['dest'])}"
    if value is None:
        return "off"
    if field in _TIMES:
        return f"{seconds(value):g} s" if value else "unlimited"
    if isinstance(value, bool):
        return "on" if value else "off"
    return "unlimited" if value == -1 else str(value)
