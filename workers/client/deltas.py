"""Merges the deltas of chunks, removes a delivered prefix from them, and converts whole answers.

A choice is an object whose texts and lists grow with every chunk while its other fields are set once. That
holds for OpenAI's two shapes and for token chunks alike, so one pair of functions serves all:
`AnswerSoFar.add` merges deltas, and `DeliveredPrefix.trim` removes from a delta what was delivered before.
The latter lets a reader change from one attempt to another, or to the final result, in the middle of a word.
"""

from __future__ import annotations

import copy
from typing import Any, Final

import msgspec

from inferbus.schemas.answers import ComputedAnswer, TokenAnswer, TokenChunk
from inferbus.workers.client.messages import Answer, Chunk, convert, of_the_contract, parse_chunk

_TEXTS: Final = frozenset({"content", "reasoning_content", "refusal", "text", "arguments"})
"""Strings that grow."""

_EXACT: Final = "token_ids"
"""The only list whose items are compared; the others are parallel to it or to a text."""

_TOKEN_PLACES: Final = ("job", "attempt", "seq", "usage", "warnings")
_CHUNK_ONLY: Final = ("seq", "object", "usage", "warnings")
_WHOLE_ONLY: Final = frozenset({"choices", "usage", "object", "metadata"})
_INDEXED: Final = "tool_calls"
_SKIPPED: Final = frozenset({"index"})
_INSIGNIFICANT: Final = frozenset({"role", "type", "logprobs"})
"""Fields that a new attempt need not repeat."""


class Diverged(Exception):
    """A newer attempt, or the result, differs from what was delivered."""


class _Text(list[str]):
    """A growing string, in pieces: joining them once keeps a long answer linear."""


class AnswerSoFar:
    """What was delivered to the user, merged."""

    def __init__(self) -> None:
        self.usage: Any = None
        self.warnings: list[str] = []
        self._choices: dict[int, dict[str, Any]] = {}
        self._frame: dict[str, Any] = {}
        # Merged when somebody asks, which few do: whoever reads a stream has read it.
        self._unmerged: list[bytes | tuple[dict[str, Any], list[dict[str, Any]]]] = []

    def __bool__(self) -> bool:
        return bool(self._unmerged or self._choices)

    @property
    def frame(self) -> dict[str, Any]:
        """What the newest chunk has beside its choices."""
        self._merge_all()
        return self._frame

    def add(self, chunk: Chunk) -> None:
        """Adds a chunk."""
        frame, choices = _split(chunk)
        if frame.get("usage") is not None:
            self.usage = frame["usage"]
        # An attempt that continues another has warnings of its own.
        self.warnings += [text for text in frame.get("warnings") or () if text not in self.warnings]
        if self._unmerged:
            # Its reader may change it meanwhile.
            self._unmerged.append(copy.deepcopy((frame, choices)))
        else:
            self._merge(frame, choices)

    def follow(self, data: bytes) -> None:
        """Adds a chunk without usage and warnings, as the body of its message."""
        self._unmerged.append(data)

    def choices(self) -> list[dict[str, Any]]:
        """The choices so far, in order; a chat choice has a `delta`."""
        self._merge_all()
        return [_joined(self._choices[index]) for index in sorted(self._choices)]

    def _merge_all(self) -> None:
        unmerged, self._unmerged = self._unmerged, []
        for each in unmerged:
            self._merge(*(_split(parse_chunk(each)) if isinstance(each, bytes) else each))

    def _merge(self, frame: dict[str, Any], choices: list[dict[str, Any]]) -> None:
        self._frame = frame
        for choice in choices:
            _merge(self._choices.setdefault(choice.get("index", 0), {}), choice)

    def prefix(self) -> DeliveredPrefix:
        """A copy, to be removed from what follows."""
        choices = {choice.get("index", 0): choice for choice in self.choices()}
        return DeliveredPrefix(choices, usage=self.usage is not None)


class DeliveredPrefix:
    """The part of a repeated answer that the user has received already.

    Args:
        choices: By their index.
        usage: Whether the usage was received as well.
    """

    def __init__(self, choices: dict[int, dict[str, Any]], *, usage: bool = False) -> None:
        self._rest = choices
        self._usage = usage

    @property
    def covered(self) -> bool:
        """Whether all of it was repeated."""
        return not any(_significant(choice) for choice in self._rest.values())

    def trim(self, chunk: Chunk) -> Chunk | None:
        """The new part of a chunk; None if nothing is new.

        Raises:
            Diverged: It differs from what was delivered.
        """
        frame, choices = _split(chunk)
        kept = []
        for choice in choices:
            rest = self._rest.get(choice.get("index", 0), {})
            left, new = _trim(choice, rest)
            if choice.get("finish_reason") is not None and _significant(rest):
                raise Diverged
            if new:
                kept.append(left)
        if not kept and (choices or frame.get("usage") is None or self._usage):
            return None
        return _unsplit(chunk, frame, kept)


def _split(chunk: Chunk) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """A chunk as its frame and its choices."""
    if isinstance(chunk, dict):
        return {key: value for key, value in chunk.items() if key != "choices"}, chunk.get("choices") or []
    choice = msgspec.to_builtins(chunk)
    frame = {key: choice.pop(key) for key in _TOKEN_PLACES if key in choice}
    return frame, [choice]


def _unsplit(chunk: Chunk, frame: dict[str, Any], choices: list[dict[str, Any]]) -> Chunk:
    if isinstance(chunk, dict):
        return {**frame, "choices": choices}
    return convert({**frame, **choices[0]}, TokenChunk)


def _merge(into: dict[str, Any], node: dict[str, Any]) -> None:
    for key, value in node.items():
        if value is None:
            into.setdefault(key, None)
        elif isinstance(value, dict):
            _merge(_child(into, key, {}), value)
        elif key == _INDEXED:
            calls = _child(into, key, {})
            for call in value:
                _merge(calls.setdefault(call.get("index", 0), {}), call)
        elif isinstance(value, list):
            _child(into, key, []).extend(value)
        elif key in _TEXTS:
            _child(into, key, _Text()).append(value)
        else:
            into[key] = value


def _child(node: dict[str, Any], key: str, empty: Any) -> Any:
    if node.get(key) is None:
        node[key] = empty
    return node[key]


def _joined(node: dict[str, Any]) -> dict[str, Any]:
    """A merged node as plain data of its own."""
    plain: dict[str, Any] = {}
    for key, value in node.items():
        if isinstance(value, _Text):
            plain[key] = "".join(value)
        elif key == _INDEXED and isinstance(value, dict):
            plain[key] = [_joined(value[index]) for index in sorted(value)]
        elif isinstance(value, dict):
            plain[key] = _joined(value)
        else:
            plain[key] = list(value) if isinstance(value, list) else value
    return plain


def _trim(node: dict[str, Any], rest: dict[str, Any]) -> tuple[dict[str, Any], bool]:
    """A node without `rest`, and whether anything is left of it; consumes `rest`."""
    left, new = {}, False
    for key, value in node.items():
        old = rest.get(key)
        if key in _SKIPPED or value is None or old is None:
            left[key] = value
            new = new or (key not in _SKIPPED and value not in (None, "", [], {}))
        elif type(value) is not type(old):
            raise Diverged
        elif isinstance(value, dict):
            left[key], more = _trim(value, old)
            new = new or more
        elif key == _INDEXED:
            left[key] = _trim_calls(value, old)
            new = new or bool(left[key])
        elif isinstance(value, list) or key in _TEXTS:
            left[key] = _rest_of(key, value, old, rest)
            new = new or bool(left[key])
        elif value == old:
            rest[key] = None
            if key in ("finish_reason", "matched_stop"):
                left[key] = None
        else:
            raise Diverged
    return left, new


def _rest_of(key: str, value: Any, old: Any, rest: dict[str, Any]) -> Any:
    common = min(len(value), len(old))
    if (key in _TEXTS or key == _EXACT) and value[:common] != old[:common]:
        raise Diverged
    rest[key] = old[common:]
    return value[common:]


def _trim_calls(calls: list[dict[str, Any]], rest: list[dict[str, Any]]) -> list[dict[str, Any]]:
    known = {call.get("index", 0): call for call in rest}
    kept = []
    for call in calls:
        left, new = _trim(call, known.get(call.get("index", 0), {}))
        if new:
            kept.append(left)
    return kept


def _significant(node: Any) -> bool:
    """Whether anything is left that a new attempt must repeat."""
    if isinstance(node, dict):
        return any(
            _significant(value)
            for key, value in node.items()
            if key not in _SKIPPED and key not in _INSIGNIFICANT
        )
    if isinstance(node, list):
        return any(_significant(item) for item in node)
    return node is not None and node != ""


@of_the_contract()
def to_answer(answer: AnswerSoFar) -> Answer:
    """The whole answer, in the shape of one that was not streamed."""
    if "object" not in answer.frame:
        return _whole_tokens(answer)
    frame = {key: value for key, value in answer.frame.items() if key not in _CHUNK_ONLY}
    kind = "chat.completion" if answer.frame["object"] == "chat.completion.chunk" else answer.frame["object"]
    choices = []
    for choice in answer.choices():
        if "delta" in choice:
            choice["message"] = _message(choice.pop("delta"))
        choices.append(choice)
    whole = {**frame, "object": kind, "choices": choices, "usage": answer.usage}
    return {**whole, "warnings": answer.warnings} if answer.warnings else whole


def _message(delta: dict[str, Any]) -> dict[str, Any]:
    message = {"role": "assistant", "content": None, **delta}
    for call in message.get(_INDEXED) or ():
        call.pop("index", None)
    return message


def _whole_tokens(answer: AnswerSoFar) -> TokenAnswer:
    nothing = {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0}
    fields = {
        "job": answer.frame.get("job", ""),
        "attempt": answer.frame.get("attempt", 1),
        "choices": [
            choice | {"finish_reason": choice.get("finish_reason") or "stop"} for choice in answer.choices()
        ],
        "usage": answer.usage or nothing,
        "warnings": answer.warnings,
    }
    return convert(fields, TokenAnswer)


@of_the_contract()
def to_chunks(answer: Answer, *, usage: bool = True) -> list[Chunk]:
    """A whole answer as the chunks of a stream: a choice's content, then its end, then the usage.

    What is computed in one piece has none.

    Args:
        answer: The answer.
        usage: Whether the stream was to report it.
    """
    if isinstance(answer, ComputedAnswer):
        return []
    if isinstance(answer, TokenAnswer):
        return _explode_tokens(answer)
    frame = {key: value for key, value in answer.items() if key not in _WHOLE_ONLY}
    kind = answer.get("object")
    frame["object"] = "chat.completion.chunk" if kind == "chat.completion" else kind
    chunks: list[Chunk] = []
    for choice in answer.get("choices") or ():
        rest = {key: value for key, value in choice.items() if key != "message"}
        ends = {key: rest.pop(key) for key in ("finish_reason", "matched_stop") if key in rest}
        content, nothing = _content(choice)
        chunks.append({**frame, "choices": [{**rest, **content, **dict.fromkeys(ends)}]})
        chunks.append({**frame, "choices": [{"index": choice.get("index", 0), **nothing, **ends}]})
    if usage and answer.get("usage") is not None:
        chunks.append({**frame, "choices": [], "usage": answer["usage"]})
    return [{**chunk, "seq": seq} for seq, chunk in enumerate(chunks) if isinstance(chunk, dict)]


def _content(choice: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """A choice's content, and none, each as a chunk has it."""
    if "message" not in choice:
        return {}, {"text": ""}
    delta = dict(choice["message"])
    if delta.get(_INDEXED):
        delta[_INDEXED] = [{"index": i, **call} for i, call in enumerate(delta[_INDEXED])]
    return {"delta": delta}, {"delta": {}}


def _explode_tokens(answer: TokenAnswer) -> list[Chunk]:
    last = len(answer.choices) - 1
    return [
        TokenChunk(
            job=answer.job,
            attempt=answer.attempt,
            seq=i,
            index=choice.index,
            token_ids=choice.token_ids,
            finish_reason=choice.finish_reason,
            matched=choice.matched,
            logprobs=choice.logprobs,
            usage=answer.usage if i == last else None,
            warnings=answer.warnings if i == 0 else [],
        )
        for i, choice in enumerate(answer.choices)
    ]
