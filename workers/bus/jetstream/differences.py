"""Whether a stream or consumer that is there is at least as strong as the one asked for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from inferbus.workers.bus.durations import seconds

Check = Callable[[Any, Any], bool]


def _equal(found: Any, wanted: Any) -> bool:
    return bool(found == wanted)


def _at_least(found: Any, wanted: Any) -> bool:
    """For limits, where -1 and 0 mean none."""
    return bool(found in (-1, 0) or (wanted not in (-1, 0) and found >= wanted))


def _not_below(found: Any, wanted: Any) -> bool:
    """For plain numbers."""
    return bool(found >= wanted)


def _covers(found: Any, wanted: Any) -> bool:
    return set(wanted) <= set(found or ())


def _no_sooner(found: Any, wanted: Any) -> bool:
    """File instead of memory is fine."""
    return bool(found in (wanted, "file"))


CHECKS: Final[dict[str, Check]] = {
    "subjects": _covers,
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
}
"""The server leaves these out when they are not set; numbers then are 0."""


def differences(wanted: dict[str, Any], found: dict[str, Any]) -> list[str]:
    """What is weaker than wanted, one text per field."""
    return [
        f"{field} is {_shown(field, _value(found, field))}, wanted {_shown(field, wanted[field])}"
        for field in _weaker(wanted, found)
    ]


def strengthened(wanted: dict[str, Any], found: dict[str, Any]) -> dict[str, Any]:
    """The configuration found, with its weaker fields raised to what is wanted."""
    raised = {field: wanted[field] for field in _weaker(wanted, found)}
    if "subjects" in raised:
        raised["subjects"] = [*found.get("subjects", ()), *raised["subjects"]]
    return found | raised


def _weaker(wanted: dict[str, Any], found: dict[str, Any]) -> list[str]:
    # A single message per subject is no limit to be raised but what makes it "the newest one"; and a cap on
    # owners is there to hold.
    exact = wanted.get("max_msgs_per_subject") == 1 or wanted.get("discard_new_per_subject")
    checks = CHECKS | ({"max_msgs_per_subject": _equal} if exact else {})
    return [
        field
        for field, check in checks.items()
        if field in wanted and not check(_value(found, field), wanted[field])
    ]


def _value(found: dict[str, Any], field: str) -> Any:
    return found.get(field, _ABSENT.get(field, 0))


def _shown(field: str, value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(value)
    if field in _TIMES:
        return f"{seconds(value):g} s" if value else "unlimited"
    if isinstance(value, bool):
        return "on" if value else "off"
    return "unlimited" if value == -1 else str(value)
