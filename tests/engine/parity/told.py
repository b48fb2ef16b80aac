"""What a side told, and where two sides differ."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import msgspec

ADDED: Final = frozenset({"job", "attempt", "seq", "warnings"})
"""What the contract adds to OpenAI's objects, at their top."""

OWN: Final = frozenset({"id", "created", "e2e_latency", "cached_tokens", "cached_tokens_details"})
"""What no two servers, and no two requests to one, have in common: ids, times, and what a cache held."""

TOLERANCE: Final = 2e-3
"""Between two log probabilities: the order of sums depends on what a cache held."""


class Told(msgspec.Struct, kw_only=True):
    """An answer: an error, one object, or chunks."""

    error: dict[str, Any] | None = None
    whole: dict[str, Any] | None = None
    chunks: list[dict[str, Any]] | None = None


class Difference(msgspec.Struct, frozen=True):
    """Where two answers differ.

    Attributes:
        path: Of the field, without the positions in lists; `answers` where SGLang alone refuses, `refuses`
            where inferbus alone does, `error` where both do.
        sglang: Its value.
        inferbus: Its value.
    """

    path: str
    sglang: Any
    inferbus: Any


def differences(http: Told, bus: Told) -> list[Difference]:
    """All of them; of streams, those of what a reader puts together, and of the shapes of chunks."""
    if http.error is not None or bus.error is not None:
        path = "answers" if bus.error is None else "refuses" if http.error is None else "error"
        return [Difference(path, http.error, bus.error)]
    if http.whole is not None and bus.whole is not None:
        return list(_fields(clean(http.whole), clean(bus.whole), ""))
    if http.chunks is None or bus.chunks is None:
        return [Difference("form", http, bus)]
    ours, theirs = [[clean(chunk) for chunk in side.chunks or []] for side in (http, bus)]
    found = list(_fields(assembled(ours), assembled(theirs), ""))
    # How many tokens a chunk holds depends on the load of the machine; what may be in a chunk does not.
    mine, other = set(_types(ours, "")), set(_types(theirs, ""))
    if mine != other:
        found.append(Difference("shape", sorted(mine - other), sorted(other - mine)))
    return found


def clean(value: Any, *, top: bool = True) -> Any:
    """A message without what differs by design."""
    if isinstance(value, list):
        return [clean(item, top=False) for item in value]
    if not isinstance(value, dict):
        return value
    kept = ((name, item) for name, item in value.items() if not (top and name in ADDED))
    return {name: "" if name in OWN else clean(item, top=False) for name, item in kept}


def assembled(chunks: list[dict[str, Any]]) -> dict[str, Any]:
    """What a reader has at the end of a stream."""
    choices: dict[int, dict[str, Any]] = {}
    rest: dict[str, Any] = {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            mine = choices.setdefault(choice["index"], {"calls": {}})
            for call in (choice.get("delta") or {}).get("tool_calls") or ():
                known = mine["calls"].setdefault(str(call["index"]), {"name": "", "arguments": ""})
                for name in known:
                    known[name] += call["function"].get(name) or ""
            for name, value in {**choice, **choice.get("delta", {})}.items():
                if value is not None and name not in ("index", "delta", "tool_calls"):
                    mine[name] = _joined(mine.get(name), value)
        if not chunk["choices"] or "usage" not in chunk:
            rest |= {name: value for name, value in chunk.items() if name != "choices"}
    return {"choices": [choices[index] for index in sorted(choices)], **rest}


def _joined(first: Any, second: Any) -> Any:
    if first is None or isinstance(second, int | float):
        return second
    if isinstance(first, dict):
        return {name: _joined(first.get(name), value) for name, value in second.items()}
    return first + second


def _fields(a: Any, b: Any, path: str) -> Iterator[Difference]:
    if isinstance(a, dict) and isinstance(b, dict):
        for name in {**a, **b}:
            where = f"{path}.{name}" if path else name
            if name in a and name in b:
                yield from _fields(a[name], b[name], where)
            else:
                yield Difference(where, a.get(name, "absent"), b.get(name, "absent"))
    elif isinstance(a, list) and isinstance(b, list) and len(a) == len(b):
        for x, y in zip(a, b, strict=True):
            yield from _fields(x, y, path)
    elif isinstance(a, float) and isinstance(b, float):
        if abs(a - b) > TOLERANCE:
            yield Difference(path, a, b)
    elif type(a) is not type(b) or a != b:
        yield Difference(path, a, b)


def _types(value: Any, path: str) -> Iterator[str]:
    """The fields of some messages, with the types that they have there."""
    yield path if value is None else f"{path}: {type(value).__name__}"
    if isinstance(value, list):
        for item in value:
            yield from _types(item, path)
    elif isinstance(value, dict):
        for name, item in value.items():
            # The alternatives to a token of a completion are a map: their texts are no fields.
            yield from _types(item, path if path.endswith("top_logprobs") else f"{path}.{name}")
