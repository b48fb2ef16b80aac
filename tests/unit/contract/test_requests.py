"""Reading request bodies: lenient where OpenAI's clients are careless, strict and named everywhere else."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from inferbus.schemas import codec, limits
from inferbus.schemas.computed import EmbeddingsRequest
from inferbus.schemas.errors import (
    CallerError,
    InvalidRequest,
    ModelNotFound,
    NotSupported,
    UndecodableBody,
    WrongKind,
)
from inferbus.schemas.kinds import parse, read
from inferbus.schemas.requests import (
    REFUSED,
    TYPES,
    WHOLE_ONLY,
    AnyRequest,
    ChatRequest,
    CompletionRequest,
    TokenRequest,
)
from inferbus.schemas.sampling import ALIASES, FIELDS
from inferbus.schemas.subjects import GENERATED, ComputedKind, GeneratedKind

SECRET = "hunter2-correct-horse"
USER = {"role": "user", "content": "a"}
CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
BODIES: dict[GeneratedKind, dict[str, Any]] = {
    "tokens": {"token_ids": [1, 2]},
    "chat": {"messages": [USER]},
    "completions": {"prompt": "a"},
}


COMPUTED_IDS: tuple[tuple[ComputedKind, str], ...] = (("embeddings", "input"), ("detokenize", "tokens"))


def tokens(**fields: Any) -> TokenRequest:
    request = parse("tokens", {"token_ids": [1, 2]} | fields)
    assert isinstance(request, TokenRequest)
    return request


def chat(*messages: Any, **fields: Any) -> ChatRequest:
    request = parse("chat", {"messages": list(messages)} | fields)
    assert isinstance(request, ChatRequest)
    return request


def completion(prompt: Any = "a", **fields: Any) -> CompletionRequest:
    request = parse("completions", {"prompt": prompt} | fields)
    assert isinstance(request, CompletionRequest)
    return request


def refused(kind: GeneratedKind, fields: dict[str, Any]) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        parse(kind, BODIES[kind] | fields)
    return caught.value


@pytest.mark.parametrize("kind", GENERATED)
def test_null_means_the_default_for_every_field(kind: GeneratedKind) -> None:
    names = {*TYPES[kind].__struct_fields__, *FIELDS, *ALIASES} - set(BODIES[kind])
    nested = ("sampling_params", "sampling_options", "stop_conditions", "functions", "no_such_field")
    bare = parse(kind, BODIES[kind])
    assert parse(kind, BODIES[kind] | dict.fromkeys((*names, *nested))) == bare


@pytest.mark.parametrize("place", ["sampling_params", "sampling_options", "stop_conditions"])
def test_null_means_the_default_inside_nested_objects(place: str) -> None:
    nulls = dict.fromkeys([*FIELDS, *ALIASES, "use_beam_search"])
    assert parse("tokens", {"token_ids": [1], place: nulls}) == parse("tokens", {"token_ids": [1]})


@pytest.mark.parametrize(
    "name", ["max_tokens", "max_completion_tokens", "max_new_tokens", "seed", "n", "top_k"]
)
def test_a_number_without_a_fraction_is_an_integer(name: str) -> None:
    request = read("tokens", b'{"token_ids":[1],"%s":16.0}' % name.encode())
    value = request.sampling.given()[ALIASES.get(name, name)]
    assert value == 16
    assert type(value) is int


@pytest.mark.parametrize("kind", GENERATED)
@pytest.mark.parametrize("value", [True, "16", 16.5, [], {}])
def test_what_is_no_integer_is_no_max_tokens(kind: GeneratedKind, value: Any) -> None:
    error = refused(kind, {"max_tokens": value})
    assert error.param == "max_tokens"
    assert "max_tokens" in error.message


def test_token_ids_are_not_taken_from_floats() -> None:
    """Floats of 32 bits lose ids beyond 2**24: better to refuse than to answer another prompt."""
    assert refused("tokens", {"token_ids": [1, 16.0]}).param == "token_ids[1]"
    for kind, name in COMPUTED_IDS:
        with pytest.raises(InvalidRequest) as caught:
            parse(kind, {name: [1, 16.0]})
        assert caught.value.param == f"{name}[1]"


def test_the_last_of_two_equal_keys_counts() -> None:
    request = read("completions", b'{"prompt":"a","prompt":"b","max_tokens":1,"max_tokens":2}')
    assert isinstance(request, CompletionRequest)
    assert (request.prompt, request.sampling.max_new_tokens) == ("b", 2)


def test_an_unknown_field_is_named_in_a_warning_and_does_no_harm() -> None:
    request = chat(
        USER, functions=[], function_call="auto", stream_options={"x": 1}, sampling_params={"y": 2}
    )
    assert request.warnings == [
        "unknown field 'functions' ignored",
        "unknown field 'function_call' ignored",
        "unknown field 'stream_options.x' ignored",
        "unknown field 'sampling_params.y' ignored",
    ]


@pytest.mark.parametrize("name", ["sampling", "warnings", "kind", "streams"])
def test_what_only_the_structs_know_cannot_be_set_from_outside(name: str) -> None:
    request = tokens(**{name: {"top_p": 0.1}})
    assert request == tokens() or request.warnings == [f"unknown field '{name}' ignored"]
    assert request.sampling == tokens().sampling


def test_warnings_are_bounded_in_number_and_length() -> None:
    request = tokens(**{f"{i:03}" + "x" * 10_000: 1 for i in range(100)})
    assert len(request.warnings) == limits.WARNINGS + 1
    assert request.warnings[-1] == f"and {100 - limits.WARNINGS} more"
    assert max(map(len, request.warnings)) < 2 * limits.NAME_CHARS


@pytest.mark.parametrize("kind", GENERATED)
@pytest.mark.parametrize("other", GENERATED)
def test_a_body_of_another_kind_is_refused(kind: GeneratedKind, other: GeneratedKind) -> None:
    if kind == other:
        assert parse(kind, BODIES[other]).kind == kind
    else:
        with pytest.raises(WrongKind, match=other):
            parse(kind, BODIES[other])


@pytest.mark.parametrize("kind", GENERATED)
def test_a_body_without_its_essential_field_is_refused(kind: GeneratedKind) -> None:
    essential = next(iter(BODIES[kind]))
    with pytest.raises(InvalidRequest) as caught:
        parse(kind, {"max_tokens": 1})
    assert caught.value.param == essential


def test_a_body_that_names_another_model_than_the_subject_is_refused() -> None:
    with pytest.raises(ModelNotFound) as caught:
        parse("tokens", {"token_ids": [1], "model": SECRET}, model="m")
    assert caught.value.param == "model"
    assert SECRET not in caught.value.message
    assert parse("tokens", {"token_ids": [1], "model": "m"}, model="m").model == "m"


@pytest.mark.parametrize(
    "messages",
    [
        pytest.param([USER, {"role": "assistant", "content": ""}, USER], id="empty-assistant-content"),
        pytest.param([USER, {"role": "assistant", "tool_calls": [CALL]}], id="tool-calls-without-content"),
        pytest.param(
            [USER, {"role": "assistant", "content": None, "tool_calls": [CALL]}],
            id="tool-calls-null-content",
        ),
        pytest.param([{"role": "assistant", "function_call": {"name": "f", "arguments": ""}}], id="legacy"),
        pytest.param([{"role": "assistant", "content": None, "refusal": "no"}], id="refusal"),
        pytest.param([{"role": "user", "content": [{"type": "text", "text": "hi"}]}], id="parts"),
        pytest.param([{"role": "user", "content": []}], id="no-parts"),
        pytest.param([{"role": "user", "content": ""}], id="empty-user-content"),
        pytest.param([{"role": "User", "content": "a"}], id="role-in-capitals-as-sglang-takes-it"),
        pytest.param([{"role": "tool", "content": "x", "tool_call_id": "c1"}], id="tool"),
    ],
)
def test_messages_that_clients_send_are_taken(messages: list[Any]) -> None:
    assert chat(*messages).messages == messages


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        pytest.param([], "messages", id="none"),
        pytest.param([{}], "messages[0].role", id="no-role"),
        pytest.param([None], "messages[0]", id="null"),
        pytest.param("x", "messages", id="text"),
        pytest.param({}, "messages", id="object"),
        pytest.param([USER, {"role": "user"}], "messages[1].content", id="no-content"),
        pytest.param([{"role": "user", "content": None}], "messages[0].content", id="null-content"),
        pytest.param([{"role": "assistant"}], "messages[0].content", id="assistant-with-nothing"),
        pytest.param([{"role": "assistant", "tool_calls": []}], "messages[0].content", id="no-calls"),
        pytest.param([{"role": "assistant", "tool_calls": "x"}], "messages[0].tool_calls", id="text-calls"),
        pytest.param([{"role": "user", "content": 5}], "messages[0].content", id="number"),
        pytest.param([{"role": "user", "content": [5]}], "messages[0].content[0]", id="part-number"),
        pytest.param(
            [{"role": "user", "content": [{"text": "a"}]}],
            "messages[0].content[0]",
            id="part-without-type",
        ),
        pytest.param(
            [{"role": "user", "content": [{"type": "text", "text": 5}]}],
            "messages[0].content[0].text",
            id="text-number",
        ),
        pytest.param([{"role": [SECRET], "content": "a"}], "messages[0].role", id="role-list"),
        pytest.param([{"role": {SECRET: 1}, "content": "a"}], "messages[0].role", id="role-object"),
        pytest.param([{"role": SECRET, "content": "a"}], "messages[0].role", id="role-unknown"),
    ],
)
def test_messages_that_make_no_sense_are_refused_by_name(messages: Any, param: str) -> None:
    error = refused("chat", {"messages": messages})
    assert error.param == param
    assert param in error.message
    assert SECRET not in error.message


def test_messages_beyond_the_limit_are_refused() -> None:
    assert refused("chat", {"messages": [USER] * (limits.MESSAGES + 1)}).param == "messages"


@pytest.mark.parametrize(
    ("prompt", "read_as"),
    [("a", "a"), ([1, 2], [1, 2]), (["a"], "a"), ([[1, 2]], [1, 2])],
    ids=["text", "ids", "text-in-a-list", "ids-in-a-list"],
)
def test_one_prompt_is_taken_in_every_shape(prompt: Any, read_as: Any) -> None:
    assert completion(prompt).prompt == read_as


@pytest.mark.parametrize(
    "prompt",
    ["", [], [[]], [""], ["a", ""], [[1], []], 1, {}, [True], [-1], [2**31], [1, "a"], [["a"]]],
    ids=repr,
)
def test_anything_else_is_no_prompt(prompt: Any) -> None:
    error = refused("completions", {"prompt": prompt})
    assert (error.param or "").startswith("prompt")


@pytest.mark.parametrize("prompt", [["a", "b"], [[1], [2, 3]], ["a", "a", "a"]], ids=str)
def test_several_prompts_are_kept_in_their_order(prompt: Any) -> None:
    assert completion(prompt).prompts == prompt


@pytest.mark.parametrize(
    ("prompt", "fields"),
    [
        (["a", [1]], {}),
        ([1, "a"], {}),
        ([[1], 2], {}),
        (["a"] * (limits.CHOICES + 1), {}),
        (["a"] * 2, {"n": limits.CHOICES // 2 + 1}),
        ([[1] * (limits.PROMPT_TOKENS // 2 + 1)] * 2, {}),
    ],
    ids=["text and ids", "id and text", "ids and id", "too many", "too many choices", "too many tokens"],
)
def test_prompts_that_are_mixed_or_too_many_are_refused(prompt: Any, fields: dict[str, Any]) -> None:
    assert refused("completions", {"prompt": prompt} | fields).param == "prompt"


@pytest.mark.parametrize("effort", ["low", "max", 0, 0.5, 0.99])
def test_reasoning_effort_is_a_level_or_a_number(effort: Any) -> None:
    assert chat(USER, reasoning_effort=effort).reasoning_effort == effort


@pytest.mark.parametrize("effort", [True, 1.0, -0.1, []], ids=str)
def test_another_reasoning_effort_is_refused(effort: Any) -> None:
    assert refused("chat", {"reasoning_effort": effort}).param == "reasoning_effort"


def test_the_ids_of_a_chat_are_its_prompt() -> None:
    request = chat(USER, input_ids=[1, 2])
    assert (request.input_ids, request.warnings) == ([1, 2], [])
    assert refused("chat", {"input_ids": "ab"}).param == "input_ids"
    assert refused("chat", {"input_ids": [1, "a"]}).param == "input_ids[1]"


@pytest.mark.parametrize("name", sorted(REFUSED))
@pytest.mark.parametrize("kind", GENERATED)
def test_what_would_change_the_answer_and_is_served_nowhere_is_refused_by_name(
    kind: GeneratedKind, name: str
) -> None:
    for fields, param in (
        ({name: "x"}, name),
        ({"sampling_params": {name: {"a": 1}}}, f"sampling_params.{name}"),
    ):
        with pytest.raises(NotSupported) as caught:
            parse(kind, BODIES[kind] | fields)
        assert caught.value.param == param
        assert caught.value.message == f"{param} is not supported"
    assert parse(kind, BODIES[kind] | {name: False}).warnings == []


@pytest.mark.parametrize("name", WHOLE_ONLY)
def test_what_only_a_whole_chat_answer_can_hold_is_refused_for_a_stream(name: str) -> None:
    assert refused("chat", {name: True, "stream": True}).param == name
    assert chat(USER, **{name: True}).warnings == []
    assert chat(USER, **{name: False}, stream=True).warnings == []


def test_a_content_part_of_an_unknown_type_is_named() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "poem"}]
    error = refused("chat", {"messages": [USER, {"role": "user", "content": parts}]})
    assert error.param == "messages[1].content[1].type"


@pytest.mark.parametrize("kind", GENERATED)
def test_the_model_may_name_an_adapter_of_it(kind: GeneratedKind) -> None:
    request = parse(kind, BODIES[kind] | {"model": "s3://m:blue"}, model="s3://m")
    assert request.lora_path == "blue"
    both = {"model": "m:blue", "lora_path": "blue"}
    assert parse(kind, BODIES[kind] | both, model="m").lora_path == "blue"
    with pytest.raises(InvalidRequest) as caught:
        parse(kind, BODIES[kind] | both | {"lora_path": "red"}, model="m")
    assert caught.value.param == "lora_path"
    for name in ("m:", "n:blue", "mm:blue", ":blue"):
        with pytest.raises(ModelNotFound):
            parse(kind, BODIES[kind] | {"model": name}, model="m")


@pytest.mark.parametrize("kind", GENERATED)
def test_priority_and_salts_are_taken_as_they_are(kind: GeneratedKind) -> None:
    fields = {"priority": -3, "cache_salt": "a", "extra_key": "b"}
    request = parse(kind, BODIES[kind] | fields)
    assert (request.priority, request.cache_salt, request.extra_key) == (-3, "a", "b")
    assert refused(kind, {"priority": "high"}).param == "priority"
    assert refused(kind, {"cache_salt": ["a"]}).param == "cache_salt"


def test_an_embeddings_request_may_name_an_adapter_as_others_may() -> None:
    request = parse("embeddings", {"model": "m:blue", "input": "a"}, model="m")
    assert isinstance(request, EmbeddingsRequest)
    assert request.lora_path == "blue"
    parse("tokenize", {"model": "m:blue", "prompt": "a"}, model="m")
    with pytest.raises(ModelNotFound):
        parse("embeddings", {"model": "n:blue", "input": "a"}, model="m")
    with pytest.raises(ModelNotFound):
        parse("tokenize", {"model": "n", "prompt": "a"}, model="m")


@pytest.mark.parametrize(
    "ids", [[], [-1], [2**31], [2**63], [2**64], [10**30], [True], ["1"], [None], 1, "1"], ids=repr
)
def test_token_ids_that_no_vocabulary_has_are_refused(ids: Any) -> None:
    assert (refused("tokens", {"token_ids": ids}).param or "").startswith("token_ids")


def test_suffix_is_refused_and_not_passed_over() -> None:
    assert completion(suffix="").suffix == ""
    assert refused("completions", {"suffix": "x"}).param == "suffix"


def test_best_of_and_response_format_of_completions() -> None:
    request = completion(best_of=3, response_format={"type": "json_object"})
    assert request.response_format == {"type": "json_object"}
    assert request.warnings == ["unknown field 'best_of' ignored"]


@pytest.mark.parametrize(
    ("kind", "fields", "param"),
    [
        ("completions", {"logprobs": 21}, "logprobs"),
        ("completions", {"logprobs": -1}, "logprobs"),
        ("completions", {"logprobs": True}, "logprobs"),
        ("chat", {"logprobs": 5}, "logprobs"),
        ("chat", {"top_logprobs": 21}, "top_logprobs"),
        ("tokens", {"logprobs": True, "top_logprobs": 2**70}, "top_logprobs"),
        ("tokens", {"top_logprobs": 1}, "top_logprobs"),
        ("tokens", {"priority": 2**63}, "priority"),
        ("chat", {"stream": "true"}, "stream"),
        ("chat", {"stream": 1}, "stream"),
        ("chat", {"stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
        ("chat", {"tools": [1]}, "tools[0]"),
        ("tokens", {"sampling_params": []}, "sampling_params"),
        (
            "tokens",
            {"stop_conditions": {"stop_token_ids_hidden": 5}},
            "stop_conditions.stop_token_ids_hidden",
        ),
    ],
)
def test_a_field_of_the_wrong_type_or_range_is_named(
    kind: GeneratedKind, fields: dict[str, Any], param: str
) -> None:
    error = refused(kind, fields)
    assert error.param == param
    assert param in error.message


def nested(depth: int, opening: str, closing: str) -> bytes:
    return f'{{"token_ids":[1],"x":{opening * depth}1{closing * depth}}}'.encode()


@pytest.mark.parametrize("depth", [limits.NESTING_DEPTH, 200, 900, 1_500, 30_000])
@pytest.mark.parametrize(("opening", "closing"), [("[", "]"), ('{"a":', "}")], ids=["arrays", "objects"])
def test_deep_nesting_is_refused(depth: int, opening: str, closing: str) -> None:
    with pytest.raises(UndecodableBody, match="nested"):
        read("tokens", nested(depth, opening, closing))


@pytest.mark.parametrize("depth", [limits.NESTING_DEPTH, 1_500, 30_000])
def test_deep_nesting_is_refused_in_messagepack(depth: int) -> None:
    body = b"\x82\xa9token_ids\x91\x01\xa1x" + b"\x91" * depth + b"\x01"
    with pytest.raises(UndecodableBody, match="nested"):
        read("tokens", body, content_type=codec.MSGPACK)


def test_moderate_nesting_is_taken() -> None:
    assert read("tokens", nested(limits.NESTING_DEPTH - 1, "[", "]")).kind == "tokens"


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        pytest.param(b'{"token_ids":[1],"x":[' + b"[]," * limits.PARTS + b"1]}", codec.JSON, id="arrays"),
        pytest.param(
            b'{"token_ids":[1],"x":["' + b'\\",[{:' * limits.PARTS + b'"' + b',""' * limits.PARTS + b"]}",
            codec.JSON,
            id="texts-with-escapes",
        ),
        pytest.param(b'{"token_ids":[1],"x":[' + b"1," * limits.VALUES + b"1]}", codec.JSON, id="numbers"),
        pytest.param(
            b"\x82\xa9token_ids\x91\x01\xa1x\xdd\x00\x0f\x42\x40" + b"\x90" * 1_000_000,
            codec.MSGPACK,
            id="messagepack-arrays",
        ),
        pytest.param(
            b"\x82\xa9token_ids\x91\x01\xa1x\xdd\xff\xff\xff\xff" + b"\x01" * limits.PARTS,
            codec.MSGPACK,
            id="messagepack-more-than-there-are",
        ),
    ],
)
def test_a_body_that_costs_far_more_than_its_size_is_refused(body: bytes, kind: str) -> None:
    with pytest.raises(UndecodableBody, match="holds more than"):
        read("tokens", body, content_type=kind)


@pytest.mark.parametrize("kind", [codec.JSON, codec.MSGPACK])
@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("tokens", {"token_ids": list(range(100_000, 1_100_000))}),
        ("completions", {"prompt": 'if (a["b"] == {"c": [1, 2]}) { return "\\\\"; }\n' * 150_000}),
        ("completions", {"prompt": "模型😀" * 500_000}),
        ("chat", {"messages": [{"role": "user", "content": [{"type": "text", "text": "hello"}]}] * 4_096}),
    ],
    ids=["a-million-token-ids", "program-text", "chinese-text", "the-most-messages"],
)
def test_a_large_honest_body_is_taken(name: GeneratedKind, fields: dict[str, object], kind: str) -> None:
    assert read(name, codec.encode(fields, kind), content_type=kind).kind == name


@pytest.mark.parametrize(
    "body",
    [
        pytest.param(b"", id="empty"),
        pytest.param(b"{", id="cut-off"),
        pytest.param(b'{"prompt":"a"} x', id="trailing"),
        pytest.param(b'\xef\xbb\xbf{"prompt":"a"}', id="byte-order-mark"),
        pytest.param(b'{"prompt":"\xff"}', id="invalid-utf8"),
        pytest.param(b'{"prompt":"a","\xff":1}', id="invalid-utf8-key"),
        pytest.param(b'{"prompt":"\xed\xa0\x80"}', id="surrogate-bytes"),
        pytest.param(rb'{"prompt":"\ud800"}', id="lone-surrogate"),
        pytest.param(rb'{"prompt":"a","\udfff":1}', id="lone-surrogate-key"),
        pytest.param(b'{"prompt":"a","temperature":NaN}', id="NaN"),
        pytest.param(b'{"prompt":"a","temperature":1e400}', id="infinite"),
        pytest.param(b'{"prompt":"a","seed":' + b"9" * 5000 + b"}", id="5000-digits"),
        pytest.param(b"[]", id="array"),
        pytest.param(b'"a"', id="text"),
        pytest.param(b"null", id="null"),
    ],
)
def test_what_is_no_json_object_is_undecodable(body: bytes) -> None:
    with pytest.raises(UndecodableBody):
        read("completions", body)


@pytest.mark.parametrize(
    "body",
    [
        pytest.param(b"", id="empty"),
        pytest.param(b"\xc1", id="never-used-byte"),
        pytest.param(b"\x81\xa6prompt\xa1\xff", id="invalid-utf8"),
        pytest.param(b"\xdf\xff\xff\xff\xff", id="4-billion-entries"),
        pytest.param(b"\xdd\xff\xff\xff\xff", id="4-billion-items"),
        pytest.param(b"\xdb\xff\xff\xff\xff", id="4-billion-bytes"),
        pytest.param(b"\x81\x81\x01\x01\x01", id="object-as-key"),
        pytest.param(b'{"prompt":"a"}', id="json"),
    ],
)
def test_what_is_no_messagepack_object_is_undecodable(body: bytes) -> None:
    with pytest.raises(UndecodableBody):
        read("completions", body, content_type=codec.MSGPACK)


@pytest.mark.parametrize("name", ["temperature", "max_tokens", "stop", "logit_bias", "tools", "messages"])
@pytest.mark.parametrize(
    "value",
    [b"abc", msgspec.msgpack.Ext(5, b"x"), msgspec.msgpack.Ext(-1, b"\x00\x00\x00\x00")],
    ids=["binary", "extension", "timestamp"],
)
def test_what_json_cannot_say_is_refused_by_name_in_messagepack(name: str, value: Any) -> None:
    body = msgspec.msgpack.encode({"messages": [USER]} | {name: [{"a": value}]})
    with pytest.raises(InvalidRequest) as caught:
        read("chat", body, content_type=codec.MSGPACK)
    assert caught.value.param == name


def test_messagepack_timestamps_are_refused() -> None:
    body = msgspec.msgpack.encode(
        {"messages": [USER], "tools": [{"a": msgspec.msgpack.Ext(-1, b"\x00" * 4)}]}
    )
    with pytest.raises(InvalidRequest):
        read("chat", body, content_type=codec.MSGPACK)


@pytest.mark.parametrize("key", [None, True, 1.5, b"k"], ids=repr)
def test_keys_that_json_cannot_have_are_refused_in_messagepack(key: Any) -> None:
    message = codec.encode({"role": "user", "content": "a"}, codec.MSGPACK)
    entry = codec.encode(key, codec.MSGPACK) + b"\x01"
    body = b"\x82\xa8messages\x91" + message + b"\xa5tools\x91\x81" + entry
    with pytest.raises(InvalidRequest) as caught:
        read("chat", body, content_type=codec.MSGPACK)
    assert caught.value.param == "tools"


def test_integer_keys_become_text_in_messagepack() -> None:
    body = msgspec.msgpack.encode({"token_ids": [1], "logit_bias": {5: 1.5}})
    assert read("tokens", body, content_type=codec.MSGPACK).sampling.logit_bias == {"5": 1.5}


def test_one_key_as_integer_and_as_text_is_refused_in_messagepack() -> None:
    body = msgspec.msgpack.encode({"token_ids": [1], "logit_bias": {5: 1.5, "5": 2}})
    with pytest.raises(InvalidRequest) as caught:
        read("tokens", body, content_type=codec.MSGPACK)
    assert caught.value.param == "logit_bias"


def test_a_surrogate_pair_is_one_character() -> None:
    request = read("completions", rb'{"prompt":"\ud83d\ude00"}')
    assert isinstance(request, CompletionRequest)
    assert request.prompt == "😀"


@pytest.mark.parametrize("kind", GENERATED)
@pytest.mark.parametrize("content_type", [codec.JSON, codec.MSGPACK])
def test_both_content_types_say_the_same(kind: GeneratedKind, content_type: str) -> None:
    fields = BODIES[kind] | {"sampling_params": {"top_p": 0.5, "stop": ["x"]}, "seed": 2**62, "stream": True}
    assert read(kind, codec.encode(fields, content_type), content_type=content_type) == parse(kind, fields)


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
NAMES = st.sampled_from(
    [
        *sorted({name for struct in TYPES.values() for name in struct.__struct_fields__}),
        *sorted({*FIELDS, *ALIASES}),
        *("sampling_params", "sampling_options", "stop_conditions", "stop_token_ids_hidden"),
    ]
)
PARTS = st.dictionaries(NAMES, JSON_VALUES, max_size=6)


def survives(kind: GeneratedKind, body: bytes, content_type: str) -> AnyRequest | None:
    """Reads; an error that is not the caller's, or that no answer can carry, fails."""
    refusal: CallerError
    try:
        return read(kind, body, content_type=content_type)
    except CallerError as error:
        refusal = error
    assert refusal.message
    msgspec.json.encode(refusal.body())
    return None


@given(st.sampled_from(GENERATED), st.binary(max_size=200), st.sampled_from([codec.JSON, codec.MSGPACK]))
@example("tokens", b"[" * 100_000, codec.JSON)
@example("tokens", b"\x91" * 100_000, codec.MSGPACK)
@example("tokens", b"\xd6\xff\xff\xff\xff\xff", codec.MSGPACK)
@settings(max_examples=500)
def test_arbitrary_bytes_never_raise_outside_the_error_tree(
    kind: GeneratedKind, body: bytes, content_type: str
) -> None:
    survives(kind, body, content_type)


@given(st.sampled_from(GENERATED), PARTS, PARTS, st.sampled_from([codec.JSON, codec.MSGPACK]))
@settings(max_examples=500)
def test_arbitrary_fields_never_raise_outside_the_error_tree(
    kind: GeneratedKind, fields: dict[str, Any], nested_fields: dict[str, Any], content_type: str
) -> None:
    body = BODIES[kind] | {"sampling_params": nested_fields} | fields
    try:
        encoded = codec.encode(body, content_type)
    except (OverflowError, msgspec.MsgspecError):  # an integer that the content type cannot carry
        return
    request = survives(kind, encoded, content_type)
    if request is not None:
        for value in request.sampling.given().values():
            assert not isinstance(value, float) or math.isfinite(value)


@given(st.sampled_from(GENERATED), NAMES, st.sampled_from([codec.JSON, codec.MSGPACK]))
@settings(max_examples=300)
def test_neither_errors_nor_warnings_hold_what_the_caller_wrote(
    kind: GeneratedKind, name: str, content_type: str
) -> None:
    for value in (SECRET, [SECRET], {"k": SECRET}, [{"k": [SECRET]}], [[SECRET]], {"1": SECRET}, [1, SECRET]):
        body = codec.encode(BODIES[kind] | {name: value}, content_type)
        said: list[str | None]
        try:
            said = list(read(kind, body, content_type=content_type, model="m").warnings)
        except CallerError as error:
            said = [error.message, error.param]
        assert not any(SECRET in text for text in said if text)
