"""Sampling parameters: one struct, whatever shape they came in.

They are accepted in four shapes, alone or together: OpenAI's names at the top
of the body (`max_tokens`, `seed`, …), SGLang's names there
(`max_new_tokens`, `sampling_seed`, …), a ready-made `sampling_params` object
with either, and Dynamo's `sampling_options` with `stop_conditions`. One
parameter given twice with different values is the caller's mistake and
refused.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta

from inferbus.schemas import codec, limits
from inferbus.schemas.errors import InvalidRequest

INT64: Final = range(-(2**63), 2**63)
INT32_MAX: Final = 2**31 - 1

TokenId = Annotated[int, Meta(ge=0, le=INT32_MAX)]
"""Of any vocabulary; see `Sampling.check_vocabulary` for a model's own."""

Grammar = Annotated[str, Meta(max_length=limits.GRAMMAR_CHARS)]
Text = Annotated[str, Meta(min_length=1)]
Texts = Text | Annotated[list[Text], Meta(max_length=limits.STOP_STRINGS)]
Bias = Annotated[float, Meta(ge=-limits.LOGIT_BIAS, le=limits.LOGIT_BIAS)]

ALIASES: Final = {
    "max_tokens": "max_new_tokens",
    "max_completion_tokens": "max_new_tokens",
    "min_tokens": "min_new_tokens",
    "seed": "sampling_seed",
    "include_stop_str_in_output": "no_stop_trim",
}
"""Accepted names that are not fields of `Sampling`, and the fields they mean."""


HIDDEN_STOPS: Final = "stop_token_ids_hidden"
"""Dynamo's name for the model's own end tokens, which it keeps apart from the caller's stop tokens."""


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

    max_new_tokens: Annotated[int, Meta(ge=1, le=INT32_MAX)] | None = None
    min_new_tokens: Annotated[int, Meta(ge=0, le=INT32_MAX)] | None = None
    temperature: Annotated[float, Meta(ge=0, le=limits.TEMPERATURE_MAX)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=INT32_MAX)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    frequency_penalty: Annotated[float, Meta(ge=-2, le=2)] | None = None
    presence_penalty: Annotated[float, Meta(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[float, Meta(gt=0, le=2)] | None = None
    stop: Texts | None = None
    stop_regex: Texts | None = None
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=limits.STOP_TOKEN_IDS)] | None = None
    ignore_eos: bool | None = None
    no_stop_trim: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    n: Annotated[int, Meta(ge=1, le=limits.CHOICES)] | None = None
    sampling_seed: Annotated[int, Meta(ge=INT64.start, le=INT64.stop - 1)] | None = None
    logit_bias: Annotated[dict[str, Bias], Meta(max_length=limits.LOGIT_BIASES)] | None = None
    json_schema: Grammar | None = None
    regex: Grammar | None = None
    ebnf: Grammar | None = None
    structural_tag: Grammar | None = None

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

    def check_vocabulary(self, size: int) -> None:
        """Checks every token id against a vocabulary; an id outside it can kill an engine.

        Raises:
            InvalidRequest: `param` names the parameter.
        """
        for name, ids in (
            ("stop_token_ids", self.stop_token_ids or ()),
            ("logit_bias", map(int, self.logit_bias or ())),
        ):
            if any(not 0 <= token < size for token in ids):
                raise InvalidRequest(
                    f"{name} holds a token id outside the vocabulary (0 to {size - 1})", param=name
                )

    def problems(self) -> Iterator[tuple[str, str]]:
        """What is wrong beyond a single value's range, which the types state: field and complaint."""
        if self.top_k == 0:
            yield "top_k", "must be -1 or at least 1"
        if self.min_new_tokens and self.max_new_tokens and self.min_new_tokens > self.max_new_tokens:
            yield "min_new_tokens", "must not be above max_tokens"
        if self.sampling_seed is not None and self.sampling_seed + self.choices - 1 not in INT64:
            yield "sampling_seed", "plus n must fit a signed 64-bit integer"
        for name in ("stop", "stop_regex"):
            value = getattr(self, name) or ()
            for text in (value,) if isinstance(value, str) else value:
                if len(text) > limits.STOP_STRING_BYTES or len(_utf8(text)) > limits.STOP_STRING_BYTES:
                    yield name, f"must hold strings of at most {limits.STOP_STRING_BYTES} bytes"
        if any(not _TOKEN_KEY.fullmatch(key) for key in self.logit_bias or ()):
            yield "logit_bias", "must have token ids as keys"
        grammars = [name for name in GRAMMARS if getattr(self, name)]
        if len(grammars) > 1:
            yield grammars[1], f"cannot be together with {grammars[0]}"


_TOKEN_KEY: Final = re.compile(r"0|[1-9][0-9]{0,9}")


def _utf8(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


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
        InvalidRequest: A wrong type, a value out of range, or one parameter with two values; `param` is
            the path that the caller used.
    """
    paths: dict[str, str] = {}
    values: dict[str, Any] = {}
    for place, given in sources.items():
        for name, raw in given.items():
            if raw is None:
                continue
            path = f"{place}.{name}" if place else name
            if name not in NAMES:
                if place:
                    warnings.append(f"unknown field {codec.bounded(path)!r} ignored")
                continue
            field, value = ALIASES.get(name, name), integral(raw) if name in INT_NAMES else raw
            if field == "logit_bias" and isinstance(value, dict):
                value = _text_keys(path, value)
            if field in values and values[field] != value:
                raise InvalidRequest(f"{path} and {paths[field]} disagree", param=path)
            paths[field], values[field] = path, value
    try:
        sampling = msgspec.convert(values, Sampling)
    except msgspec.ValidationError as error:
        message, param = codec.split_path(str(error))
        field = re.split(r"[.\[]", param or "", maxsplit=1)[0]
        path = paths.get(field, field)
        raise InvalidRequest(
            f"{path}{message.removeprefix(field)}", param=f"{path}{(param or '').removeprefix(field)}"
        ) from None
    for field, complaint in sampling.problems():
        path = paths.get(field, field)
        raise InvalidRequest(f"{path} {complaint}", param=path)
    return sampling


def _text_keys(path: str, bias: dict[Any, Any]) -> dict[Any, Any]:
    """Token ids as text, as JSON has them, of a dictionary that was built in Python."""
    renamed = {str(key) if type(key) is int else key: value for key, value in bias.items()}
    if len(renamed) != len(bias):
        raise InvalidRequest(f"{path} names one token twice", param=path)
    return renamed
