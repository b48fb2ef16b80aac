"""What a client may ask for: one struct a kind, and the one function that reads a body.

The structs are lenient where OpenAI's clients are careless (`null` means the
default, `16.0` is an integer, unknown fields are named in the answer's
`warnings`) and strict everywhere else.
"""

from __future__ import annotations

from typing import Any, ClassVar, Final

import msgspec

from schemas import codec, limits
from schemas.errors import InvalidRequest, ModelNotFound, WrongKind
from schemas.sampling import ALIASES, FIELDS, Sampling, collect, integral
from schemas.subjects import Kind


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
        lora_path: Name of a loaded adapter.
        cache_salt: Sets the prompt's cache apart from others'.
        warnings: What was ignored; sent with the answer.
    """

    kind: ClassVar[Kind]
    streams: ClassVar[bool]

    sampling: Sampling = Sampling()
    model: str | None = None
    stream: bool | None = None
    user: str | None = None
    priority: int | None = None
    lora_path: str | None = None
    cache_salt: str | None = None
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

    token_ids: list[int]
    logprobs: bool | None = None
    top_logprobs: int | None = None

    def check(self) -> None:
        if not self.token_ids:
            raise InvalidRequest("token_ids must not be empty", param="token_ids")
        if len(self.token_ids) > limits.PROMPT_TOKENS:
            raise InvalidRequest(f"token_ids must hold at most {limits.PROMPT_TOKENS} ids", param="token_ids")
        _check_top_logprobs(self.top_logprobs)
        if self.top_logprobs and not self.logprobs:
            raise InvalidRequest("top_logprobs needs logprobs: true", param="top_logprobs")


class ChatRequest(Request, omit_defaults=True, kw_only=True):
    """OpenAI's chat completion request, with SGLang's extensions.

    Messages, tools and formats stay plain objects here: SGLang's own conversion reads them, so that
    an answer equals its OpenAI server's.
    """

    kind = "chat"
    streams = False

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    response_format: dict[str, Any] | None = None
    stream_options: StreamOptions | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    reasoning_effort: str | None = None
    reasoning: dict[str, Any] | None = None
    separate_reasoning: bool | None = None
    stream_reasoning: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    continue_final_message: bool | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: str | None = None

    def check(self) -> None:
        if not self.messages:
            raise InvalidRequest("messages must not be empty", param="messages")
        if len(self.messages) > limits.MESSAGES:
            raise InvalidRequest(f"messages must hold at most {limits.MESSAGES}", param="messages")
        for i, message in enumerate(self.messages):
            _check_message(f"messages[{i}]", message)
        _check_top_logprobs(self.top_logprobs)


class CompletionRequest(Request, omit_defaults=True, kw_only=True):
    """OpenAI's completion request.

    One prompt a request: a text or a list of token ids. Many prompts are many jobs.
    """

    kind = "completions"
    streams = False

    prompt: str | list[int]
    echo: bool | None = None
    suffix: str | None = None
    logprobs: int | None = None
    response_format: dict[str, Any] | None = None
    stream_options: StreamOptions | None = None

    def check(self) -> None:
        if not self.prompt:
            raise InvalidRequest("prompt must not be empty", param="prompt")
        if not isinstance(self.prompt, str) and len(self.prompt) > limits.PROMPT_TOKENS:
            raise InvalidRequest(f"prompt must hold at most {limits.PROMPT_TOKENS} ids", param="prompt")
        _check_top_logprobs(self.logprobs, "logprobs")
        if self.suffix:
            raise InvalidRequest("suffix is not supported", param="suffix")


AnyRequest = TokenRequest | ChatRequest | CompletionRequest

TYPES: Final[dict[Kind, type[AnyRequest]]] = {
    "tokens": TokenRequest,
    "chat": ChatRequest,
    "completions": CompletionRequest,
}

_ESSENTIAL: Final[dict[Kind, str]] = {"tokens": "token_ids", "chat": "messages", "completions": "prompt"}
_NESTED_SAMPLING: Final = ("sampling_params", "sampling_options", "stop_conditions")
_SAMPLING_TOP: Final = frozenset(FIELDS) | frozenset(ALIASES)
_INTS: Final = frozenset({"top_logprobs", "priority"})
_ROLES: Final = frozenset({"system", "developer", "user", "assistant", "tool", "function"})


def read(kind: Kind, body: bytes, *, content_type: str = codec.JSON, model: str | None = None) -> AnyRequest:
    """The request in a body, checked as far as that goes without a model.

    Args:
        kind: The subject's.
        body: As received.
        content_type: `codec.JSON` or `codec.MSGPACK`.
        model: The subject's; a body that names another is refused.

    Raises:
        UndecodableBody: Not of that content type, or no object.
        WrongKind: A body of another kind.
        ModelNotFound: Of another model.
        InvalidRequest: A field is missing, of the wrong type, out of range or too large.
    """
    return parse(kind, codec.decode_object(body, content_type), model=model)


def parse(kind: Kind, fields: dict[str, Any], *, model: str | None = None) -> AnyRequest:
    """`read`, of a body that is decoded already."""
    _check_kind(kind, fields)
    target = TYPES[kind]
    warnings: list[str] = []
    sources: dict[str, dict[str, Any]] = {"": fields}
    for name in _NESTED_SAMPLING:
        nested = fields.get(name)
        if nested is None:
            continue
        if not isinstance(nested, dict):
            raise InvalidRequest(f"{name} must be an object", param=name)
        sources[name] = nested
    own = {}
    for name, value in fields.items():
        if name in _NESTED_SAMPLING or name in _SAMPLING_TOP:
            continue
        if name not in target.__struct_fields__ or name in ("sampling", "warnings"):
            warnings.append(f"unknown field {name[:64]!r} ignored")
        elif value is not None:
            own[name] = integral(value) if name in _INTS else value
    if kind == "completions" and "logprobs" in own:
        own["logprobs"] = integral(own["logprobs"])
    sampling = collect(sources, warnings)
    try:
        request = msgspec.convert(own, target)
    except msgspec.ValidationError as error:
        message, param = codec.split_path(str(error))
        raise InvalidRequest(message, param=param) from None
    request.sampling = sampling
    request.warnings = _bounded(warnings)
    if model is not None and request.model not in (None, model):
        raise ModelNotFound("the body names another model than the subject", param="model")
    request.check()
    return request


def _check_kind(kind: Kind, fields: dict[str, Any]) -> None:
    essential = _ESSENTIAL[kind]
    if fields.get(essential) is not None:
        return
    others = [other for other, name in _ESSENTIAL.items() if fields.get(name) is not None]
    if others:
        raise WrongKind(
            f"a body of the kind {others[0]!r} came on a subject of the kind {kind!r}", param=essential
        )
    raise InvalidRequest(f"{essential} is missing", param=essential)


def _check_message(path: str, message: dict[str, Any]) -> None:
    role = message.get("role")
    if role not in _ROLES:
        raise InvalidRequest(f"{path}.role must be one of {', '.join(sorted(_ROLES))}", param=f"{path}.role")
    content = message.get("content")
    if content is None:
        if role != "assistant" or not any(message.get(key) for key in ("tool_calls", "reasoning_content")):
            raise InvalidRequest(f"{path}.content is missing", param=f"{path}.content")
    elif isinstance(content, list):
        if not all(isinstance(part, dict) and isinstance(part.get("type"), str) for part in content):
            raise InvalidRequest(f"{path}.content must hold parts with a type", param=f"{path}.content")
    elif not isinstance(content, str):
        raise InvalidRequest(f"{path}.content must be a string or a list of parts", param=f"{path}.content")


def _check_top_logprobs(value: int | None, name: str = "top_logprobs") -> None:
    if value is not None and not 0 <= value <= limits.TOP_LOGPROBS:
        raise InvalidRequest(f"{name} must be between 0 and {limits.TOP_LOGPROBS}", param=name)


def _bounded(warnings: list[str]) -> list[str]:
    if len(warnings) <= limits.WARNINGS:
        return warnings
    return [*warnings[: limits.WARNINGS], f"and {len(warnings) - limits.WARNINGS} more"]
