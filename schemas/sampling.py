"""Sampling parameters: one struct, whatever shape they came in.

They are accepted in four shapes, alone or together: OpenAI's names at the top
of the body (`max_tokens`, `seed`, …), SGLang's names there
(`max_new_tokens`, `sampling_seed`, …), a ready-made `sampling_params` object
with either, and Dynamo's `sampling_options` with `stop_conditions`. One
parameter given twice with different values is the caller's mistake and
refused.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, Final

import msgspec

from schemas import limits
from schemas.errors import InvalidRequest

INT64: Final = range(-(2**63), 2**63)

ALIASES: Final = {
    "max_tokens": "max_new_tokens",
    "max_completion_tokens": "max_new_tokens",
    "min_tokens": "min_new_tokens",
    "seed": "sampling_seed",
    "include_stop_str_in_output": "no_stop_trim",
}
"""Accepted names that are not fields of `Sampling`, and the fields they mean."""


class Sampling(msgspec.Struct, kw_only=True, omit_defaults=True, frozen=True):
    """Sampling parameters in SGLang's names; None means the model's own default.

    Attributes:
        max_new_tokens: Most tokens of one choice; None: as many as the context has room for.
        min_new_tokens: No stop before that many tokens.
        temperature: 0 is greedy; up to 2.
        top_p: In (0, 1].
        top_k: -1 for all, or at least 1.
        min_p: In [0, 1].
        frequency_penalty: In [-2, 2].
        presence_penalty: In [-2, 2].
        repetition_penalty: In (0, 2].
        stop: Strings that end a choice; left out of the text unless `no_stop_trim`.
        stop_regex: Patterns that end a choice.
        stop_token_ids: Tokens that end a choice.
        ignore_eos: Go on after the model's own end token.
        no_stop_trim: Keep what ended the choice in its text.
        skip_special_tokens: Leave special tokens out of the text.
        spaces_between_special_tokens: As in transformers.
        n: Choices.
        sampling_seed: int64; choice `i` uses the seed plus `i`.
        logit_bias: Token id (as a string) to bias.
        json_schema: JSON Schema as text; at most one of the four grammars.
        regex: Regular expression.
        ebnf: Grammar.
        structural_tag: SGLang's structural tag as JSON text.
    """

    max_new_tokens: int | None = None
    min_new_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    stop: str | list[str] | None = None
    stop_regex: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    no_stop_trim: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    n: int | None = None
    sampling_seed: int | None = None
    logit_bias: dict[str, float] | None = None
    json_schema: str | None = None
    regex: str | None = None
    ebnf: str | None = None
    structural_tag: str | None = None

    def given(self) -> dict[str, Any]:
        """The parameters that are not None, by name."""
        return {name: value for name in FIELDS if (value := getattr(self, name)) is not None}

    @property
    def choices(self) -> int:
        """`n`, or 1."""
        return self.n or 1

    @property
    def grammar(self) -> str | None:
        """The name of the grammar parameter in use, if any."""
        return next((name for name in GRAMMARS if getattr(self, name)), None)

    def check(self) -> None:
        """Checks everything that needs no model.

        Raises:
            InvalidRequest: `param` names the first parameter that is out of range.
        """
        for name, problem in self._problems():
            raise InvalidRequest(f"{name} {problem}", param=name)

    def check_vocabulary(self, size: int) -> None:
        """Checks every token id against a vocabulary; an id outside it can kill an engine.

        Raises:
            InvalidRequest: `param` names the parameter.
        """
        for name, ids in (
            ("stop_token_ids", self.stop_token_ids or ()),
            ("logit_bias", [int(key) for key in self.logit_bias or ()]),
        ):
            if any(not 0 <= token < size for token in ids):
                raise InvalidRequest(
                    f"{name} holds a token id outside the vocabulary (0 to {size - 1})", param=name
                )

    def _problems(self) -> Iterator[tuple[str, str]]:
        for name, (low, high, text) in _RANGES.items():
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and low <= value <= high):
                yield name, text
        for name in ("top_p", "repetition_penalty"):
            if getattr(self, name) == 0:
                yield name, _RANGES[name][2]
        if self.top_k is not None and self.top_k != -1 and self.top_k not in range(1, 2**31):
            yield "top_k", "must be -1 or at least 1"
        if self.sampling_seed is not None and self.sampling_seed not in INT64:
            yield "seed", "must fit a signed 64-bit integer"
        if (
            self.max_new_tokens is not None
            and self.min_new_tokens is not None
            and self.min_new_tokens > self.max_new_tokens
        ):
            yield "min_tokens", "must not be above max_tokens"
        yield from self._list_problems()
        if sum(bool(getattr(self, name)) for name in GRAMMARS) > 1:
            yield "sampling_params", f"holds more than one of {', '.join(GRAMMARS)}"
        for name in GRAMMARS:
            if len(getattr(self, name) or "") > limits.GRAMMAR_CHARS:
                yield name, f"must have at most {limits.GRAMMAR_CHARS} characters"

    def _list_problems(self) -> Iterator[tuple[str, str]]:
        for name in ("stop", "stop_regex"):
            value = getattr(self, name)
            texts = [value] if isinstance(value, str) else value or []
            if len(texts) > limits.STOP_STRINGS:
                yield name, f"must hold at most {limits.STOP_STRINGS} strings"
            if any(len(text.encode("utf-8", "surrogatepass")) > limits.STOP_STRING_BYTES for text in texts):
                yield name, f"must hold strings of at most {limits.STOP_STRING_BYTES} bytes"
            if any(not text for text in texts):
                yield name, "must not hold an empty string"
        if len(self.stop_token_ids or ()) > limits.STOP_TOKEN_IDS:
            yield "stop_token_ids", f"must hold at most {limits.STOP_TOKEN_IDS} ids"
        bias = self.logit_bias or {}
        if len(bias) > limits.LOGIT_BIASES:
            yield "logit_bias", f"must hold at most {limits.LOGIT_BIASES} entries"
        if any(not (key.isascii() and key.isdigit() and len(key) < 12) for key in bias):
            yield "logit_bias", "must have token ids as keys"
        if any(not math.isfinite(value) for value in bias.values()):
            yield "logit_bias", "must hold finite numbers"


FIELDS: Final = Sampling.__struct_fields__
GRAMMARS: Final = ("json_schema", "regex", "ebnf", "structural_tag")
NAMES: Final = frozenset(FIELDS) | frozenset(ALIASES)
"""Every accepted name of a sampling parameter."""

INT_NAMES: Final = frozenset(
    {
        "max_new_tokens",
        "min_new_tokens",
        "top_k",
        "n",
        "sampling_seed",
        "max_tokens",
        "max_completion_tokens",
        "min_tokens",
        "seed",
    }
)

_TOKENS_MAX: Final = 2**31 - 1
_RANGES: Final[dict[str, tuple[float, float, str]]] = {
    "max_new_tokens": (1, _TOKENS_MAX, "(max_tokens) must be at least 1"),
    "min_new_tokens": (0, _TOKENS_MAX, "(min_tokens) must not be negative"),
    "temperature": (0, limits.TEMPERATURE_MAX, f"must be between 0 and {limits.TEMPERATURE_MAX:g}"),
    "top_p": (0, 1, "must be above 0 and at most 1"),
    "min_p": (0, 1, "must be between 0 and 1"),
    "frequency_penalty": (-2, 2, "must be between -2 and 2"),
    "presence_penalty": (-2, 2, "must be between -2 and 2"),
    "repetition_penalty": (0, 2, "must be above 0 and at most 2"),
    "n": (1, limits.CHOICES, f"must be between 1 and {limits.CHOICES}"),
}


def integral(value: Any) -> Any:
    """A float without a fraction as an int: JSON has one kind of number, and clients send `16.0`."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def collect(sources: dict[str, dict[str, Any]], warnings: list[str]) -> Sampling:
    """One `Sampling` from all the places of a body that may hold parameters.

    Args:
        sources: Place in the body (`""` for its top) to the object found there. From the top only known
            names are taken; unknown ones elsewhere go to `warnings`.
        warnings: Extended.

    Raises:
        InvalidRequest: A wrong type, or one parameter with two values.
    """
    taken: dict[str, tuple[str, Any]] = {}
    for place, values in sources.items():
        for name, raw in values.items():
            path = f"{place}.{name}" if place else name
            if name not in NAMES:
                if place:
                    warnings.append(f"unknown field {path!r} ignored")
                continue
            if raw is None:
                continue
            field, value = ALIASES.get(name, name), integral(raw) if name in INT_NAMES else raw
            if field == "logit_bias" and isinstance(value, dict):
                value = {str(key): bias for key, bias in value.items()}
            if field in taken and taken[field][1] != value:
                raise InvalidRequest(f"{path} and {taken[field][0]} disagree", param=path)
            taken[field] = (path, value)
    fields = {}
    for field, (path, value) in taken.items():
        try:
            fields[field] = msgspec.convert(value, _TYPES[field])
        except msgspec.ValidationError as error:
            raise InvalidRequest(f"{path}: {error}", param=path) from None
    sampling = Sampling(**fields)
    sampling.check()
    return sampling


_TYPES: Final[dict[str, Any]] = {field.name: field.type for field in msgspec.structs.fields(Sampling)}
