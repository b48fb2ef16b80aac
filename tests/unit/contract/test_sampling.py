"""Sampling parameters: four shapes, one meaning, every range."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from inferbus.schemas import codec, limits
from inferbus.schemas.errors import InvalidRequest
from inferbus.schemas.kinds import parse, read
from inferbus.schemas.sampling import ALIASES, FIELDS, Sampling


def sampling(**fields: Any) -> Sampling:
    return parse("tokens", {"token_ids": [1]} | fields).sampling


def refused(**fields: Any) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        sampling(**fields)
    return caught.value


def test_every_shape_means_the_same() -> None:
    openai = sampling(max_tokens=5, seed=1, min_tokens=2, stop="x", include_stop_str_in_output=True)
    completion_tokens = sampling(max_completion_tokens=5, seed=1, min_tokens=2, stop="x", no_stop_trim=True)
    sglang = {"max_new_tokens": 5, "sampling_seed": 1, "min_new_tokens": 2, "stop": "x", "no_stop_trim": True}
    assert openai == completion_tokens == sampling(**sglang) == sampling(sampling_params=sglang)
    assert openai == sampling(
        sampling_options={"seed": 1, "include_stop_str_in_output": True},
        stop_conditions={"max_tokens": 5, "min_tokens": 2, "stop": "x"},
    )


def test_a_dynamo_request_is_understood() -> None:
    body = {
        "token_ids": [1, 2],
        "sampling_options": {"temperature": 0.5, "top_k": -1, "n": None, "use_beam_search": None, "seed": 7},
        "stop_conditions": {
            "max_tokens": 8,
            "min_tokens": 0,
            "stop": None,
            "stop_token_ids": [3],
            "stop_token_ids_hidden": [2, 3],
            "ignore_eos": True,
        },
        "output_options": {},
        "eos_token_ids": [2],
        "annotations": [],
    }
    request = parse("tokens", body)
    assert request.sampling == Sampling(
        temperature=0.5,
        top_k=-1,
        sampling_seed=7,
        max_new_tokens=8,
        min_new_tokens=0,
        stop_token_ids=[3, 2, 3],
        ignore_eos=True,
    )
    assert request.warnings == [
        f"unknown field '{x}' ignored" for x in ("output_options", "eos_token_ids", "annotations")
    ]


@pytest.mark.parametrize("alias", sorted(ALIASES))
def test_one_parameter_with_two_values_is_refused_by_both_names(alias: str) -> None:
    two: tuple[Any, Any] = (True, False) if alias == "include_stop_str_in_output" else (5, 6)
    error = refused(**{alias: two[0]}, sampling_params={ALIASES[alias]: two[1]})
    assert error.param == f"sampling_params.{ALIASES[alias]}"
    assert alias in error.message


def test_one_parameter_given_twice_alike_is_taken() -> None:
    assert (
        sampling(
            max_tokens=5, max_completion_tokens=5.0, sampling_params={"max_new_tokens": 5}
        ).max_new_tokens
        == 5
    )


ACCEPTED: list[tuple[str, Any]] = [
    ("temperature", 0),
    ("temperature", 1e-9),
    ("temperature", 2),
    ("top_p", 1),
    ("top_p", 1e-9),
    ("top_k", -1),
    ("top_k", 1),
    ("min_p", 0),
    ("frequency_penalty", -2),
    ("presence_penalty", 2),
    ("repetition_penalty", 2),
    ("max_tokens", 1),
    ("min_tokens", 0),
    ("n", limits.CHOICES),
    ("seed", -(2**63)),
    ("seed", 2**63 - 1),
    ("stop", "x"),
    ("stop", []),
    ("stop", ["x"] * limits.STOP_STRINGS),
    ("stop", "x" * limits.STOP_STRING_BYTES),
    ("stop_token_ids", [0, 2**31 - 1]),
    ("logit_bias", {"0": -100, "151000": 100}),
    ("json_schema", ""),
]
REFUSED: list[tuple[str, str, Any]] = [
    ("F5", "max_tokens", 0),
    ("F5", "max_tokens", -1),
    ("F5", "max_tokens", 1.5),
    ("F5", "max_tokens", 10**20),
    ("F5", "max_completion_tokens", 0),
    ("F5", "min_tokens", -1),
    ("F6", "temperature", -0.1),
    ("F6", "temperature", 2.1),
    ("F6", "temperature", 10**20),
    ("F6", "temperature", "hot"),
    ("F6", "temperature", True),
    ("F6", "top_p", 0),
    ("F6", "top_p", 0.0),
    ("F6", "top_p", 1.1),
    ("F6", "top_k", 0),
    ("F6", "top_k", -2),
    ("F6", "top_k", 2**31),
    ("F6", "min_p", -0.1),
    ("F6", "min_p", 1.1),
    ("F6", "frequency_penalty", 2.5),
    ("F6", "presence_penalty", -2.5),
    ("F6", "repetition_penalty", 0),
    ("F6", "repetition_penalty", 2.5),
    ("F6", "n", 0),
    ("F6", "n", limits.CHOICES + 1),
    ("F6", "seed", 2**63),
    ("F6", "seed", -(2**63) - 1),
    ("F6", "seed", 10**30),
    ("F3", "stop", ["x"] * (limits.STOP_STRINGS + 1)),
    ("F3", "stop", "x" * (limits.STOP_STRING_BYTES + 1)),
    ("F3", "stop", "é" * (limits.STOP_STRING_BYTES // 2 + 1)),
    ("F3", "stop", ""),
    ("F3", "stop_regex", ["x"] * (limits.STOP_STRINGS + 1)),
    ("F3", "stop_token_ids", list(range(100_000))),
    ("F3", "logit_bias", {str(i): 1 for i in range(limits.LOGIT_BIASES + 1)}),
    ("F3", "json_schema", "x" * (limits.GRAMMAR_CHARS + 1)),
    ("F1", "logit_bias", {"-1": 5}),
    ("F1", "logit_bias", {"05": 5}),
    ("F1", "logit_bias", {"٣": 5}),
    ("F1", "logit_bias", {"1e3": 5}),
    ("F1", "logit_bias", {"": 5}),
    ("F1", "logit_bias", {"1": 1e308}),
    ("F1", "logit_bias", {"1": 10**400}),
    ("F1", "logit_bias", {"1": None}),
    ("F1", "logit_bias", {"1": True}),
    ("F1", "logit_bias", [1]),
]


@pytest.mark.parametrize(
    ("name", "value"), ACCEPTED, ids=[f"{name}={value!r:.20}" for name, value in ACCEPTED]
)
def test_a_value_in_range_is_taken(name: str, value: Any) -> None:
    assert sampling(**{name: value}).given() == {ALIASES.get(name, name): value}


@pytest.mark.parametrize("place", ["", "sampling_params", "sampling_options"])
@pytest.mark.parametrize(
    ("name", "value"),
    [row[1:] for row in REFUSED],
    ids=[f"{row}-{name}={value!r:.20}" for row, name, value in REFUSED],
)
def test_a_value_out_of_range_is_refused_under_the_name_that_the_caller_used(
    name: str, value: Any, place: str
) -> None:
    error = refused(**({place: {name: value}} if place else {name: value}))
    path = f"{place}.{name}" if place else name
    assert error.param is not None
    assert error.param.split("[")[0] == path
    assert path in error.message


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")], ids=str)
@pytest.mark.parametrize("name", [n for n in FIELDS if n not in ("logit_bias",)] + sorted(ALIASES))
def test_no_parameter_takes_nan_or_infinity(name: str, value: float) -> None:
    body = msgspec.msgpack.encode({"token_ids": [1], name: value})
    with pytest.raises(InvalidRequest) as caught:
        read("tokens", body, content_type=codec.MSGPACK)
    assert caught.value.param == name


@pytest.mark.parametrize("value", [float("nan"), float("inf")], ids=str)
def test_no_bias_is_nan_or_infinite(value: float) -> None:
    body = msgspec.msgpack.encode({"token_ids": [1], "logit_bias": {1: value}})
    with pytest.raises(InvalidRequest) as caught:
        read("tokens", body, content_type=codec.MSGPACK)
    assert caught.value.param == "logit_bias"


def test_a_seed_that_n_choices_would_carry_beyond_int64_is_refused() -> None:
    assert sampling(seed=2**63 - 2, n=2).choices == 2
    assert refused(seed=2**63 - 2, n=3).param == "seed"


def test_more_minimum_than_maximum_is_refused() -> None:
    assert refused(min_tokens=5, max_tokens=4).param == "min_tokens"


def test_two_grammars_are_refused_and_an_empty_one_is_none() -> None:
    assert sampling(json_schema="{}", regex="").grammar == "json_schema"
    assert refused(json_schema="{}", regex="a").param == "regex"


def test_a_bias_or_stop_token_outside_the_vocabulary_is_refused() -> None:
    for name, value in (("logit_bias", {"100": 5}), ("stop_token_ids", [100])):
        found = sampling(**{name: value})
        found.check_vocabulary(101)
        with pytest.raises(InvalidRequest) as caught:
            found.check_vocabulary(100)
        assert caught.value.param == name


def test_a_bias_given_for_one_token_twice_is_refused() -> None:
    assert refused(logit_bias={5: 1, "5": 2}).param == "logit_bias"


def test_only_what_was_given_goes_to_the_engine() -> None:
    assert sampling(temperature=0, top_p=None).given() == {"temperature": 0}
