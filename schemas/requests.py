"""What a client may ask for: one struct a kind, and the one function that reads a body.

The structs are lenient where OpenAI's clients are careless (`null` means the
default, `16.0` is an integer, unknown fields are named in the answer's
`warnings`) and strict everywhere else.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Final

import msgspec
from msgspec import Meta

from inferbus.schemas import codec, limits
from inferbus.schemas.errors import InvalidRequest, ModelNotFound, NotSupported, WrongKind
from inferbus.schemas.sampling import (
    ALIASES,
    HIDDEN_STOPS,
    INT64,
    NAMES,
    Sampling,
    TokenId,
    collect,
    integral,
)
from inferbus.schemas.subjects import GeneratedKind, Kind

TokenIds = Annotated[list[TokenId], Meta(min_length=1, max_length=limits.PROMPT_TOKENS)]
Text = Annotated[str, Meta(min_length=1)]
TopLogprobs = Annotated[int, Meta(ge=0, le=limits.TOP_LOGPROBS)]
Effort = Annotated[float, Meta(ge=0, le=limits.REASONING_EFFORT)]


class StreamOptions(msgspec.Struct, omit_defaults=True, kw_only=True):
    """OpenAI's `stream_options`.

    Attributes:
        include_usage: Send a last chunk without choices that holds the usage.
        continuous_usage_stats: Send the usage so far with every chunk.
    """

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class Request(msgspec.Struct, omit_defaults=True, kw_only=True):
    """What the three kinds share.

    Attributes:
        sampling: The parameters, from whatever shape they came in.
        model: Must be the subject's model where it is given.
        stream: Whether chunks are wanted; None is the kind's default.
        user: Passed over.
        priority: Higher first, where the engine schedules by priority.
        lora_path: Name of a loaded adapter; `model` may name it too, as `model:adapter`.
        cache_salt: Sets the prompt's cache apart from others'.
        extra_key: As `cache_salt`; one for each of two reasons to keep caches apart.
        warnings: What was ignored; sent with the answer.
    """

    kind: ClassVar[GeneratedKind]
    streams: ClassVar[bool]

    sampling: Sampling = Sampling()
    model: str | None = None
    stream: bool | None = None
    user: str | None = None
    priority: Annotated[int, Meta(ge=INT64.start, le=INT64.stop - 1)] | None = None
    lora_path: str | None = None
    cache_salt: str | None = None
    extra_key: str | None = None
    warnings: list[str] = []

    def check(self) -> None:
        """Checks what needs no model.

        Raises:
            InvalidRequest: `param` names the field.
        """


class TokenRequest(Request, omit_defaults=True, kw_only=True):
    """Token ids in, token ids out; nothing is rendered, nothing is decoded.

    Attributes:
        token_ids: The prompt.
        logprobs: Send the log probability of every token.
        top_logprobs: And those of that many alternatives; 0 to 20.
    """

    kind = "tokens"
    streams = True

    token_ids: TokenIds
    logprobs: bool | None = None
    top_logprobs: TopLogprobs | None = None

    def check(self) -> None:
        """See `Request.check`."""
        if self.top_logprobs and not self.logprobs:
            raise InvalidRequest("top_logprobs needs logprobs: true", param="top_logprobs")


class ChatRequest(Request, omit_defaults=True, kw_only=True):
    """OpenAI's chat completion request, with SGLang's extensions.

    Messages, tools and formats stay plain objects here: SGLang's own conversion reads them, so that
    an answer equals its OpenAI server's.

    Attributes:
        input_ids: The prompt's tokens, in place of what the template would make of `messages`.
        reasoning_effort: A level, or a number from 0 to 0.99.
        thinking: Read by the templates of some models.
        task: Read by the templates of some models.
        return_token_ids: Put the tokens of prompt and answer into each choice of a whole answer.
        return_prompt_token_ids: Put the prompt's tokens into each choice of a whole answer.
        return_meta_info: Put the engine's figures into each choice of a whole answer.
        return_cached_tokens_details: Say in `sglext` where the cached tokens of the prompt were.
        return_spec_tokens_details: Say in `sglext` how speculative decoding went.
        return_input_ids_in_sglext: Put the prompt's tokens into `sglext`.
        return_output_ids_in_sglext: Put the answer's tokens into `sglext`.
    """

    kind = "chat"
    streams = False

    messages: Annotated[list[dict[str, Any]], Meta(min_length=1, max_length=limits.MESSAGES)]
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    response_format: dict[str, Any] | None = None
    stream_options: StreamOptions | None = None
    logprobs: bool | None = None
    top_logprobs: TopLogprobs | None = None
    input_ids: TokenIds | None = None
    reasoning_effort: str | Effort | None = None
    reasoning: dict[str, Any] | None = None
    separate_reasoning: bool | None = None
    stream_reasoning: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    continue_final_message: bool | None = None
    thinking: Any = None
    task: str | None = None
    return_token_ids: bool | None = None
    return_prompt_token_ids: bool | None = None
    return_meta_info: bool | None = None
    return_cached_tokens_details: bool | None = None
    return_spec_tokens_details: bool | None = None
    return_input_ids_in_sglext: bool | None = None
    return_output_ids_in_sglext: bool | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: str | None = None

    def check(self) -> None:
        """See `Request.check`."""
        for name in WHOLE_ONLY if self.stream else ():
            if getattr(self, name):
                raise InvalidRequest(f"{name} needs stream: false", param=name)
        for i, message in enumerate(self.messages):
            _check_message(f"messages[{i}]", message)


class CompletionRequest(Request, omit_defaults=True, kw_only=True):
    """OpenAI's completion request.

    Attributes:
        prompt: A text or token ids, or several of one of these; each gets `n` choices, one prompt's after
            another's.
        return_token_ids: Put the tokens of the answer, and once those of the prompt, into each choice.
        return_cached_tokens_details: Say in `sglext` where the cached tokens of the prompt were.
        return_spec_tokens_details: Say in `sglext` how speculative decoding went.
    """

    kind = "completions"
    streams = False

    prompt: (
        Text | Annotated[list[TokenId | Text | TokenIds], Meta(min_length=1, max_length=limits.PROMPT_TOKENS)]
    )
    echo: bool | None = None
    suffix: str | None = None
    logprobs: TopLogprobs | None = None
    response_format: dict[str, Any] | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    return_cached_tokens_details: bool | None = None
    return_spec_tokens_details: bool | None = None

    @property
    def prompts(self) -> list[str | list[int]]:
        """The prompts: mostly one."""
        prompt: Any = self.prompt
        return [prompt] if isinstance(prompt, str) or isinstance(prompt[0], int) else prompt

    def check(self) -> None:
        """See `Request.check`."""
        if self.suffix:
            raise InvalidRequest("suffix is not supported", param="suffix")
        if isinstance(self.prompt, list) and len({type(part) for part in self.prompt}) > 1:
            raise InvalidRequest(
                "prompt must be a text, token ids, or a list of one of these", param="prompt"
            )
        prompts = self.prompts
        if len(prompts) * self.sampling.choices > limits.CHOICES:
            raise InvalidRequest(f"prompt and n ask for more than {limits.CHOICES} choices", param="prompt")
        if sum(len(prompt) for prompt in prompts if isinstance(prompt, list)) > limits.PROMPT_TOKENS:
            raise InvalidRequest(f"prompt has more than {limits.PROMPT_TOKENS} token ids", param="prompt")


AnyRequest = TokenRequest | ChatRequest | CompletionRequest

TYPES: Final[dict[Kind, type[AnyRequest]]] = {
    "tokens": TokenRequest,
    "chat": ChatRequest,
    "completions": CompletionRequest,
}

ESSENTIAL: Final[dict[Kind, str]] = {"tokens": "token_ids", "chat": "messages", "completions": "prompt"}
"""The field without which a body of a kind is none."""

NESTED_SAMPLING: Final = {
    "sampling_params": "SGLang's: sampling parameters, under any of their names.",
    "sampling_options": "Dynamo's: sampling parameters, under any of their names.",
    "stop_conditions": "Dynamo's: sampling parameters, under any of their names.",
}
"""Objects of a body that may hold sampling parameters."""

COMPLETION_TOKENS: Final = 16
"""OpenAI's default of `max_tokens` for completions, over HTTP and in batch files; the bus has none."""

_MAX_TOKENS: Final = ("max_new_tokens", *(name for name in ALIASES if ALIASES[name] == "max_new_tokens"))

WHOLE_ONLY: Final = ("return_token_ids", "return_prompt_token_ids", "return_meta_info")
"""Fields of a chat request that put into a whole answer what SGLang's chunks have no place for."""

REFUSED: Final = frozenset(
    {
        "return_hidden_states",
        "return_routed_experts",
        "return_sampling_mask",
        "return_flat_raw_output_top_logprobs",
        "sampling_logprobs_mode",
        "custom_logit_processor",
        "watermark",
    }
)
"""Fields of SGLang's requests that change the answer or add to it, and that no worker serves."""

_INTS: Final[dict[Kind, frozenset[str]]] = {
    "tokens": frozenset({"top_logprobs", "priority"}),
    "chat": frozenset({"top_logprobs", "priority"}),
    "completions": frozenset({"logprobs", "priority"}),
}
_OWN: Final[dict[Kind, frozenset[str]]] = {
    kind: frozenset(struct.__struct_fields__) - {"sampling", "warnings"} for kind, struct in TYPES.items()
}
_STREAM_OPTIONS: Final = frozenset(StreamOptions.__struct_fields__)
_ROLES: Final = frozenset({"system", "developer", "user", "assistant", "tool", "function"})
_PARTS: Final = frozenset({"text", "thinking", "reasoning", "tool_reference"})
MEDIA: Final = frozenset(
    {"image_url", "input_image", "image", "video_url", "audio_url", "input_audio", "file"}
)
"""Types of content parts that hold no text."""

_INSTEAD_OF_CONTENT: Final = ("tool_calls", "reasoning_content", "function_call", "refusal")


def parse(kind: Kind, fields: dict[str, Any], *, model: str | None = None) -> AnyRequest:
    """The request in a decoded body; see `inferbus.schemas.kinds.parse`."""
    _check_kind(kind, fields)
    warnings: list[str] = []
    own: dict[str, Any] = {}
    for name, value in fields.items():
        if value is None or name in NAMES or name in NESTED_SAMPLING:
            continue
        if name in REFUSED:
            _refuse(name, value)
        elif name in _OWN[kind]:
            own[name] = integral(value) if name in _INTS[kind] else value
        else:
            warnings.append(f"unknown field {codec.bounded(name)!r} ignored")
    if kind == "completions":
        own["prompt"] = _one_prompt(own["prompt"])
    options = own.get("stream_options")
    if isinstance(options, dict):
        unknown = [name for name in options if name not in _STREAM_OPTIONS and options[name] is not None]
        warnings += [f"unknown field {codec.bounded(f'stream_options.{name}')!r} ignored" for name in unknown]
    sampling = collect({"": fields} | _nested_sampling(fields), warnings)
    try:
        request = msgspec.convert(own, TYPES[kind])
    except msgspec.ValidationError as error:
        message, param = codec.split_path(str(error))
        raise InvalidRequest(message, param=param) from None
    request.sampling = sampling
    request.warnings = bounded(warnings)
    if model is not None:
        request.lora_path = chosen_adapter(request.model, model, request.lora_path)
    request.check()
    return request


def bounds_tokens(fields: Mapping[str, Any]) -> bool:
    """Whether a body says how many tokens it wants at most."""
    nested = (each for name in NESTED_SAMPLING if isinstance(each := fields.get(name), Mapping))
    return any(each.get(name) is not None for each in (fields, *nested) for name in _MAX_TOKENS)


def _nested_sampling(fields: dict[str, Any]) -> dict[str, dict[str, Any]]:
    found = {}
    for name in NESTED_SAMPLING:
        nested = fields.get(name)
        if nested is None:
            continue
        if not isinstance(nested, dict):
            raise InvalidRequest(f"{name} must be an object", param=name)
        for key in REFUSED & nested.keys():
            _refuse(f"{name}.{key}", nested[key])
        # Dynamo keeps the model's own end tokens apart from the caller's; both end a choice.
        hidden = nested.get(HIDDEN_STOPS)
        if hidden is not None:
            ids = nested.get("stop_token_ids") or []
            if not isinstance(hidden, list) or not isinstance(ids, list):
                raise InvalidRequest(
                    f"{name}.{HIDDEN_STOPS} must be an array", param=f"{name}.{HIDDEN_STOPS}"
                )
            nested = {key: value for key, value in nested.items() if key != HIDDEN_STOPS}
            nested["stop_token_ids"] = [*ids, *hidden]
        found[name] = nested
    return found


def _refuse(path: str, value: Any) -> None:
    if value:
        raise NotSupported(f"{path} is not supported", param=path)


def chosen_adapter(named: str | None, model: str, lora_path: str | None) -> str | None:
    """The adapter that a request is for: the body's model may name it, as SGLang's server takes it.

    Args:
        named: The body's model.
        model: The subject's.
        lora_path: The body's field.

    Raises:
        ModelNotFound: The body names another model.
        InvalidRequest: It names two adapters.
    """
    if named is None or named == model:
        return lora_path
    adapter = named.removeprefix(f"{model}:")
    if adapter in ("", named):
        raise ModelNotFound("the body names another model than the subject", param="model")
    if lora_path not in (None, adapter):
        raise InvalidRequest("lora_path and the adapter in model disagree", param="lora_path")
    return adapter


def _one_prompt(prompt: Any) -> Any:
    """OpenAI's clients put even a single prompt into a list."""
    if not isinstance(prompt, list) or len(prompt) != 1:
        return prompt
    (only,) = prompt
    ids = isinstance(only, list) and not any(isinstance(part, str | list) for part in only[:1])
    return only if isinstance(only, str) or ids else prompt


def _check_kind(kind: Kind, fields: dict[str, Any]) -> None:
    essential = ESSENTIAL[kind]
    if fields.get(essential) is not None:
        return
    others = [other for other, name in ESSENTIAL.items() if fields.get(name) is not None]
    if others:
        raise WrongKind(
            f"a body of the kind {others[0]!r} came on a subject of the kind {kind!r}", param=essential
        )
    raise InvalidRequest(f"{essential} is missing", param=essential)


def _check_message(path: str, message: dict[str, Any]) -> None:
    role = message.get("role")
    # SGLang's server takes a role in any case.
    if not isinstance(role, str) or role.lower() not in _ROLES:
        raise InvalidRequest(f"{path}.role must be one of {', '.join(sorted(_ROLES))}", param=f"{path}.role")
    calls = message.get("tool_calls")
    if calls is not None and not (isinstance(calls, list) and all(isinstance(call, dict) for call in calls)):
        raise InvalidRequest(f"{path}.tool_calls must be an array of objects", param=f"{path}.tool_calls")
    content = message.get("content")
    if content is None:
        if role.lower() != "assistant" or not any(message.get(key) for key in _INSTEAD_OF_CONTENT):
            raise InvalidRequest(f"{path}.content is missing", param=f"{path}.content")
    elif isinstance(content, list):
        for i, part in enumerate(content):
            _check_part(f"{path}.content[{i}]", part)
    elif not isinstance(content, str):
        raise InvalidRequest(f"{path}.content must be a string or an array of parts", param=f"{path}.content")


def _check_part(path: str, part: Any) -> None:
    if not isinstance(part, dict) or not isinstance(part.get("type"), str):
        raise InvalidRequest(f"{path} must be an object with a type", param=path)
    if part["type"] not in _PARTS | MEDIA:
        known = ", ".join(sorted(_PARTS))
        raise InvalidRequest(f"{path}.type must be one of {known}", param=f"{path}.type")
    if part["type"] == "text" and not isinstance(part.get("text"), str):
        raise InvalidRequest(f"{path}.text must be a string", param=f"{path}.text")


def bounded(warnings: list[str]) -> list[str]:
    """As many warnings as one answer names; the rest are counted."""
    if len(warnings) <= limits.WARNINGS:
        return warnings
    return [*warnings[: limits.WARNINGS], f"and {len(warnings) - limits.WARNINGS} more"]
