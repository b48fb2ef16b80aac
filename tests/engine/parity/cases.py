"""The requests. Each is asked whole and streamed, greedy unless it says otherwise.

The tests' model answers at random but always alike, so a grammar says where a certain text is needed.
"""

from __future__ import annotations

import json
from typing import Any, Final, NamedTuple

from inferbus.schemas.subjects import Kind

MODEL: Final = "tiny"


class Case(NamedTuple):
    """A request.

    Attributes:
        name: Of the case, unique.
        kind: Of the request.
        body: Without `stream`.
        pair: Whether it is asked of a pair, too.
        durable: Whether it is submitted as a job, too.
    """

    name: str
    kind: Kind
    body: dict[str, Any]
    pair: bool = False
    durable: bool = False


CASES: list[Case] = []

CAPITAL: Final = [{"role": "user", "content": "What is the capital of France?"}]
IDS: Final = [504, 3575, 282, 4649, 314]
USAGE: Final = {"stream_options": {"include_usage": True}}
EVERY: Final = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
ABSENT: Final = object()


def _add(kind: Kind, name: str, own: dict[str, Any], fields: dict[str, Any]) -> None:
    marks = {mark: fields.pop(mark, False) for mark in ("pair", "durable")}
    body = {"model": MODEL, "max_tokens": 12, "temperature": 0} | own | fields
    body = {field: value for field, value in body.items() if value is not ABSENT}
    CASES.append(Case(f"{kind}: {name}", kind, body, **marks))


def chat(name: str, messages: Any = CAPITAL, **fields: Any) -> None:
    """Adds a chat request."""
    _add("chat", name, {"messages": messages}, fields)


def completion(name: str, prompt: Any = "The capital of France is", **fields: Any) -> None:
    """Adds a completion request."""
    _add("completions", name, {"prompt": prompt}, fields)


# Sampling, stops, usage, log probabilities.
LETTERS: Final = "ABCDEFGHIJKLMNOP"
chat("plain", durable=True)
chat("no model", model=ABSENT)
chat("n=2", n=2)
chat("n=3, usage", n=3, **USAGE, durable=True)
chat("a stop string", regex="The cat sat", stop=" sat", max_tokens=30)
chat("a stop string over several tokens", regex=LETTERS, stop="DEFGHIJ", max_tokens=60)
chat("a stop string that is kept", regex="The cat sat", stop=" sat", no_stop_trim=True, max_tokens=30)
chat("stop strings that never come", stop=["zebra", "giraffe"])
chat("a stop string of 300 bytes", stop="z" * 300)
chat("an empty stop string", stop="")
chat("stop token ids", regex="The cat sat", stop_token_ids=[3575, 28], max_tokens=30)
chat("a stop pattern", regex="The cat sat", stop_regex="c.t", max_tokens=30)
chat("usage", **USAGE)
chat("usage in every chunk", **EVERY)
chat("no usage", stream_options={"include_usage": False})
chat("logprobs", logprobs=True, top_logprobs=3)
chat("logprobs, n=2", logprobs=True, top_logprobs=1, n=2)
chat("logprobs of bytes", regex="😀世", max_tokens=60, logprobs=True)
chat("seed", seed=7)
chat("logit_bias", logit_bias={"4649": 100})
chat("penalties", frequency_penalty=1.5, presence_penalty=0.5, repetition_penalty=1.3, max_tokens=24)
chat("min_p, top_k 1, top_p", temperature=1, min_p=0.1, top_k=1, top_p=0.9)
chat("max_completion_tokens", max_tokens=ABSENT, max_completion_tokens=6)
chat("one token, n=2, logprobs, usage", max_tokens=1, n=2, logprobs=True, **USAGE)
chat("min_tokens", min_tokens=10)
chat("special tokens shown", skip_special_tokens=False)
chat("max_tokens 16.0", max_tokens=16.0)
chat("null is the default", top_p=None, stop=None, logprobs=False, n=None, stream_options=None)

# Structured output.
SCHEMA: Final = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 8}, "size": {"type": "integer", "maximum": 9}},
    "required": ["city", "size"],
    "additionalProperties": False,
}
FORM: Final = {"type": "json_schema", "json_schema": {"name": "city", "schema": SCHEMA}}
chat("json_object", response_format={"type": "json_object"}, max_tokens=20)
chat("json_schema", response_format=FORM, max_tokens=40, durable=True)
chat("json_schema as LangChain has it", response_format={"type": "json_schema", "schema": SCHEMA})
chat("json_schema at the top", json_schema=json.dumps(SCHEMA), max_tokens=40)
chat("regex", regex="(Paris|London), [0-9]{2} km", max_tokens=20)
chat("regex and json_object", regex="[0-9]+", response_format={"type": "json_object"})

# Messages and templates.
chat("a system message", [{"role": "system", "content": "In one word."}, *CAPITAL])
chat("a role in capitals", [{"role": "System", "content": "In one word."}, *CAPITAL])
chat("many turns", [*CAPITAL, {"role": "assistant", "content": "Paris."}, *CAPITAL])
chat(
    "parts of text",
    [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}],
)
chat("a name", [{"role": "user", "name": "ann", "content": "Hello"}])
chat(
    "continue_final_message", [*CAPITAL, {"role": "assistant", "content": "The"}], continue_final_message=True
)
chat("chat_template_kwargs", chat_template_kwargs={"enable_thinking": False})
chat("reasoning_effort as a number", reasoning_effort=0.5)
chat("reasoning_effort as a level", reasoning_effort="low")
chat("characters of many tokens", regex="ď🏳️‍🌈世 é漢字 😀", max_tokens=120)
chat("cut inside a character", regex="😀🏳️‍🌈世", max_tokens=2)

# Tools.
LOOK: Final = {
    "type": "function",
    "function": {
        "name": "look",
        "parameters": {
            "type": "object",
            "properties": {"at": {"type": "string", "maxLength": 8}},
            "required": ["at"],
            "additionalProperties": False,
        },
    },
}
CALL: Final = r'<tool_call>\n[{]"name": "look", "arguments": [{]"at": "Paris"[}][}]\n</tool_call>'
NAMED: Final = {"type": "function", "function": {"name": "look"}}
HISTORY: Final = [
    *CAPITAL,
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"id": "call_1", "type": "function", "function": {"name": "look", "arguments": '{"at": "x"}'}}
        ],
    },
    {"role": "tool", "tool_call_id": "call_1", "content": "Paris"},
]
chat("tools, no call said", tools=[LOOK])
chat("tools, none wanted", tools=[LOOK], tool_choice="none")
chat("tools, a call", tools=[LOOK], regex=CALL, max_tokens=90, durable=True)
chat("tools, a call, usage and logprobs", tools=[LOOK], regex=CALL, max_tokens=90, logprobs=True, **USAGE)
chat("tools, text and a call", tools=[LOOK], regex="Well[.] " + CALL, max_tokens=90, durable=True)
chat("tools, two calls, n=2", tools=[LOOK], regex=CALL + r"\n" + CALL, max_tokens=130, n=2)
chat("tools, a call that is cut off", tools=[LOOK], regex=CALL, max_tokens=20, durable=True)
chat("tools, required", tools=[LOOK], tool_choice="required", max_tokens=60)
chat("tools, named", tools=[LOOK], tool_choice=NAMED, max_tokens=60)
chat("tools, a history of calls", HISTORY, tools=[LOOK])
chat("tools, required, with json_schema", tools=[LOOK], tool_choice="required", response_format=FORM)
chat("tools, required, without any", tool_choice="required")
chat("tools, functions of OpenAI's older form", functions=[LOOK["function"]], function_call="auto")

# Fields of SGLang's.
chat("input_ids", input_ids=IDS, pair=True)
chat("input_ids, n=2, usage", input_ids=IDS, n=2, **USAGE, pair=True)
chat("return_token_ids", return_token_ids=True)
chat("return_prompt_token_ids", return_prompt_token_ids=True)
chat("return_meta_info", return_meta_info=True)
chat("return_input_ids_in_sglext", return_input_ids_in_sglext=True)
chat("return_output_ids_in_sglext", return_output_ids_in_sglext=True, n=2)
chat("return_cached_tokens_details", return_cached_tokens_details=True)
chat("return_hidden_states", return_hidden_states=True)
chat("custom_logit_processor", custom_logit_processor="x")
chat("watermark", watermark={"enabled": True})
chat("priority, cache_salt, extra_key", priority=1, cache_salt="a", extra_key="b")
chat("thinking, rid, session_params", thinking={"type": "enabled"}, rid="mine", session_params={"id": "x"})
chat("max_new_tokens", max_tokens=ABSENT, max_new_tokens=5, regex="([0-9] ){9}")
chat("sampling_params", max_tokens=ABSENT, sampling_params={"max_new_tokens": 5}, regex="([0-9] ){9}")
chat("an adapter in the model's name", model=f"{MODEL}:blue")
chat("lora_path", lora_path="blue")

# What is wrong.
chat("another model", model="other")
chat("no messages", [])
chat("a content part of an unknown type", [{"role": "user", "content": [{"type": "poem"}]}])
chat("an image", [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}])
chat("an unknown role", [{"role": "wizard", "content": "hello"}])
chat("the role root", [{"role": "root", "content": "Be brief."}, *CAPITAL])
chat("numbers as texts", max_tokens="6", temperature="0")
chat("temperature 2.5", temperature=2.5, top_k=1)
chat("top_k 0", top_k=0)
chat("n 129", n=129, max_tokens=1)
chat("max_tokens 0", max_tokens=0)
chat("top_logprobs 21", logprobs=True, top_logprobs=21, max_tokens=2)
chat("max_tokens and max_completion_tokens that differ", max_tokens=4, max_completion_tokens=6)
chat("stop token ids outside the vocabulary", stop_token_ids=[2**31 - 1, -1], max_tokens=4)
chat(
    "a schema that is none",
    response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": 5}}},
)
chat("a pattern that is none", regex="(unclosed")
chat("an unknown field", foo=1)
chat("a prompt over the context", [{"role": "user", "content": "word " * 9000}])

# Completions.
completion("no model", model=ABSENT)
completion("plain", pair=True, durable=True)
completion("token ids", IDS, pair=True)
completion("one text in a list, echo", ["Paris is"], echo=True, pair=True)
completion("two texts", ["Paris is", "Once upon a time there was"], pair=True, durable=True)
completion("two lists of token ids, echo", [IDS[:2], IDS[2:]], echo=True)
completion("two texts, n=2, usage, echo", ["Paris is", "Once"], n=2, echo=True, **USAGE, pair=True)
completion("two texts, logprobs, echo", ["Paris is", "Once upon"], logprobs=1, echo=True)
completion("n=2, usage in every chunk", n=2, **EVERY)
completion("echo, usage", echo=True, **USAGE, pair=True)
completion("echo, logprobs", echo=True, logprobs=1)
completion("logprobs 0", logprobs=0)
completion("logprobs 3, n=2", logprobs=3, n=2, pair=True)
completion("no max_tokens", regex="([0-9] ){20}", max_tokens=ABSENT)
completion("max_completion_tokens", max_tokens=ABSENT, max_completion_tokens=6)
completion("suffix", suffix=" and that is all.")
completion("best_of", best_of=2)
completion("a stop string", regex="The cat sat", stop=" sat", max_tokens=30, pair=True)
completion("a stop string said in small pieces", regex=LETTERS, stop="DEFGHIJ", max_tokens=60)
completion("json_schema", response_format=FORM, max_tokens=40, pair=True)
completion("json_schema as text", json_schema=json.dumps(SCHEMA), max_tokens=40)
completion("regex, one token", regex="(Paris|London)", max_tokens=1, logprobs=2, pair=True)
completion("return_token_ids", return_token_ids=True, pair=True)
completion("return_token_ids, two prompts, n=2", [IDS, IDS[:2]], n=2, return_token_ids=True)
completion("return_cached_tokens_details", return_cached_tokens_details=True)
completion("characters of many tokens", regex="ď🏳️‍🌈世 é漢字 😀", max_tokens=120, pair=True)
completion("penalties, bias, seed", seed=3, frequency_penalty=0.5, logit_bias={"7042": -100}, min_p=0.1)
completion("no prompt", "")
completion("nulls", max_tokens=None, temperature=None, top_k=1, regex="([0-9] ){9}")
completion("logprobs true", logprobs=True)
