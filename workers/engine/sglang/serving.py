"""SGLang's OpenAI server as a library: its request conversion and its formatters, without HTTP.

Chat templates, tools, reasoning, structured output and the format of chunks are
SGLang's, so that an answer equals its server's. The parts used are private
(`_convert_to_internal_request`, `_generate_chat_stream`,
`_build_chat_response`, their siblings for completions, and `_tokenize_texts`);
`startup.py` bounds the versions.
"""

from __future__ import annotations

import asyncio
import copy
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import structlog

from inferbus.schemas.computed import TokenizeRequest
from inferbus.schemas.errors import InvalidRequest, NotSupported
from inferbus.schemas.requests import MEDIA, ChatRequest, CompletionRequest
from inferbus.workers.engine.sglang.redaction import safe
from inferbus.workers.engine.sglang.toolcalls import cut_off

log = structlog.get_logger()

LONG_CHARS: Final = 16_384
"""Texts of this length take the tokenizer several milliseconds, which would block the event loop."""

THREADS: Final = 2
"""For conversions. Most of a conversion is tokenising, which releases the interpreter lock; the rest, in many
threads, would keep the lock from the event loop. With the loop's own executor the first of 128 prompts was
ready after 0.4 s, like the last one; with two threads after 0.03 s, and the last one in half the time."""

_SAMPLING_NAMES: Final = {
    "max_new_tokens": "max_completion_tokens",
    "min_new_tokens": "min_tokens",
    "sampling_seed": "seed",
}
"""Names of `Sampling` that differ in OpenAI's request."""

_LATE: Final = ("json_schema", "structural_tag", "spaces_between_special_tokens")
"""Parameters that a chat request has no field for; put on SGLang's parameters afterwards."""

_CHAT_FIELDS: Final = (
    "messages",
    "input_ids",
    "tools",
    "tool_choice",
    "parallel_tool_calls",
    "response_format",
    "logprobs",
    "top_logprobs",
    "reasoning_effort",
    "reasoning",
    "separate_reasoning",
    "stream_reasoning",
    "chat_template_kwargs",
    "continue_final_message",
    "thinking",
    "task",
    "priority",
    "lora_path",
    "return_token_ids",
    "return_prompt_token_ids",
    "return_meta_info",
    "return_cached_tokens_details",
    "return_spec_tokens_details",
    "return_input_ids_in_sglext",
    "return_output_ids_in_sglext",
)
_COMPLETION_FIELDS: Final = (
    "prompt",
    "echo",
    "logprobs",
    "response_format",
    "priority",
    "lora_path",
    "return_token_ids",
    "return_cached_tokens_details",
    "return_spec_tokens_details",
)
_MUTATED: Final = frozenset({"tools", "response_format", "chat_template_kwargs"})
"""Fields that SGLang changes in place."""

_MOVED: Final = frozenset({"reasoning"})
"""Fields that SGLang's types do not name, and move into others before they look."""


class PassThrough:
    """Stands in for the tokenizer manager in SGLang's formatters.

    They hand their first argument to `generate_request` and format what comes; here it comes back.
    """

    def __init__(self, manager: Any) -> None:
        self._manager = manager

    def __getattr__(self, name: str) -> Any:
        return getattr(self._manager, name)

    def generate_request(self, source: Any, _request: Any = None) -> Any:
        """Gives back what it was given."""
        return source


def _chat_class(base: Any) -> Any:
    class Chat(base):  # type: ignore[misc]
        """SGLang's handler; it leaves the arguments of a call that was cut off as they are."""

        def _check_for_unstreamed_tool_args(
            self, parser: Any, content: dict[str, Any], *rest: Any, **named: Any
        ) -> Any:
            finish = content["meta_info"].get("finish_reason") or {}
            if cut_off(finish.get("type", ""), finish.get("matched")):
                return None
            return super()._check_for_unstreamed_tool_args(parser, content, *rest, **named)

    return Chat


class Serving:
    """The two handlers of SGLang's OpenAI server, on an embedded engine."""

    def __init__(self, engine: Any) -> None:
        from sglang.srt.entrypoints.openai.serving_completions import OpenAIServingCompletion

        self._manager = engine.tokenizer_manager
        stand_in = PassThrough(self._manager)
        self.chat = _chat_class(self._manager.serving_chat_class)(stand_in, engine.template_manager)
        self.completion = OpenAIServingCompletion(stand_in, engine.template_manager)
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="inferbus-conversion")
        self._trusts_templates = bool(getattr(engine.server_args, "trust_request_chat_template", False))
        if self.chat.tool_call_parser:
            log.info("tool_calls.parsed", parser=self.chat.tool_call_parser)
        elif self.has_chat_template and self._manager.is_generation:
            log.warning(
                "tool_calls.not_parsed",
                reason="tool calls come as plain text: none was found for the model's chat template; "
                "--tool-call-parser names one",
            )

    @property
    def has_chat_template(self) -> bool:
        """Whether the model can chat."""
        return bool(
            getattr(self._manager.tokenizer, "chat_template", None)
            or self.chat.template_manager.chat_template_name
            or self.chat.chat_encoding_spec
        )

    async def convert(self, request: ChatRequest | CompletionRequest) -> tuple[Any, Any]:
        """SGLang's request, its `input_ids` a list for each prompt, and its OpenAI form.

        Raises:
            InvalidRequest: SGLang refused it, or its template did.
            NotSupported: It holds what the model, or this version of SGLang, cannot take.
        """
        handler = self.chat if isinstance(request, ChatRequest) else self.completion
        if isinstance(request, ChatRequest):
            self._refuse(request)
        openai = _parse(_model_type(request), _fields(request))
        openai.model = "default"  # A colon in the name would be read as `base:adapter`.
        try:
            problem = handler._validate_request(openai)
        except Exception as error:  # foreign code, over the caller's schema
            raise _refused(error, request) from error
        if problem:
            raise _problem(problem, request)
        loop = asyncio.get_running_loop()
        try:
            # Off the loop: rendering and tokenising a long prompt takes a while.
            converted, openai = await loop.run_in_executor(
                self._threads, handler._convert_to_internal_request, openai, None
            )
            converted.input_ids = await self._prompts(converted)
        except Exception as error:  # a template and a tokenizer may raise anything
            raise _refused(error, request) from error
        openai.model = self._manager.served_model_name
        return converted, openai

    async def tokenize(self, request: TokenizeRequest) -> list[int]:
        """The tokens of a chat's messages, as its conversion makes them.

        Raises:
            InvalidRequest: SGLang refused them, or its template did.
            NotSupported: They hold what the model cannot take, or this SGLang tokenises no chats.
        """
        from sglang.srt.entrypoints.openai import protocol
        from sglang.srt.entrypoints.openai.serving_tokenize import OpenAIServingTokenize

        chat = request.chat
        assert chat is not None
        if not hasattr(OpenAIServingTokenize, "_tokenize_chat_request"):
            raise NotSupported("this worker's SGLang tokenises no messages", param="messages")
        if not self.has_chat_template:
            raise NotSupported("the model has no chat template", param="messages")
        self._refuse(chat)
        fields = _fields(chat)
        own = {"add_generation_prompt": request.add_generation_prompt}
        if request.add_special_tokens is not None:
            own["add_special_tokens"] = request.add_special_tokens
        asked = _parse(protocol.TokenizeRequest, fields | own)
        handler = OpenAIServingTokenize(self._manager)
        handler.chat_serving = self.chat
        try:
            loop = asyncio.get_running_loop()
            return list(await loop.run_in_executor(self._threads, handler._tokenize_chat_request, asked))
        except Exception as error:  # a template and a tokenizer may raise anything
            raise _refused(error, chat) from error

    async def _prompts(self, converted: Any) -> list[list[int]]:
        """The tokens of each prompt."""
        token_ids = converted.input_ids
        if token_ids is None:
            texts = [converted.text] if isinstance(converted.text, str) else converted.text
            return [await self._tokenize(text) for text in texts]
        several = bool(token_ids) and isinstance(token_ids[0], list)
        return list(token_ids) if several else [list(token_ids)]

    async def _tokenize(self, text: str) -> list[int]:
        """Tokenises a prompt as the tokenizer manager would, a long one off the loop."""
        tokenizing = self._manager._tokenize_texts(text, False)
        if len(text) < LONG_CHARS or self._manager.async_dynamic_batch_tokenizer is not None:
            token_ids, _ = await tokenizing
        else:
            # Without the batching tokenizer there is nothing in it to wait for.
            loop = asyncio.get_running_loop()
            token_ids, _ = await loop.run_in_executor(self._threads, asyncio.run, tokenizing)
        return list(token_ids)

    def _refuse(self, request: ChatRequest) -> None:
        """Refuses what some versions of SGLang accept, or report differently."""
        template = (request.chat_template_kwargs or {}).get("chat_template")
        if template is not None and not self._trusts_templates:
            raise InvalidRequest(
                "chat_template_kwargs.chat_template is not allowed: a template is code",
                param="chat_template_kwargs.chat_template",
            )
        for i, message in enumerate(request.messages):
            content = message.get("content")
            for part in content if isinstance(content, list) else ():
                if part["type"] in MEDIA:
                    raise NotSupported(
                        "images, audio, video and files are not supported", param=f"messages[{i}].content"
                    )
        constrained = next(
            (name for name in ("response_format", "regex", "ebnf") if _given(request, name)), None
        )
        if constrained and (request.tool_choice == "required" or isinstance(request.tool_choice, dict)):
            raise InvalidRequest(
                f"{constrained} and a tool_choice that asks for a call exclude each other", param=constrained
            )


def _given(request: ChatRequest, name: str) -> bool:
    """Whether a request asks for a form of its answer by this field."""
    if name == "response_format":
        return (request.response_format or {}).get("type") not in (None, "text")
    return bool(getattr(request.sampling, name))


def _fields(request: ChatRequest | CompletionRequest) -> dict[str, Any]:
    """The request in SGLang's OpenAI fields."""
    chat = isinstance(request, ChatRequest)
    fields: dict[str, Any] = {}
    for name in _CHAT_FIELDS if chat else _COMPLETION_FIELDS:
        value = getattr(request, name)
        if value is not None:
            fields[name] = copy.deepcopy(value) if name in _MUTATED else value
    for name, value in request.sampling.given().items():
        if name not in _LATE or (name == "json_schema" and not chat):
            fields[_SAMPLING_NAMES.get(name, name)] = value
    if not chat and "max_completion_tokens" in fields:
        fields["max_tokens"] = fields.pop("max_completion_tokens")
    fields["stream"] = bool(request.stream)
    if request.stream_options is not None:
        fields["stream_options"] = {
            "include_usage": bool(request.stream_options.include_usage),
            "continuous_usage_stats": bool(request.stream_options.continuous_usage_stats),
        }
    return fields


def with_late_parameters(
    sampling: dict[str, Any], request: ChatRequest | CompletionRequest
) -> dict[str, Any]:
    """SGLang's parameters with those that the OpenAI request could not carry, and without empty ones.

    Raises:
        InvalidRequest: One of them is there already, from `response_format` or from tools.
    """
    merged = {name: value for name, value in sampling.items() if value is not None and name != "n"}
    given = request.sampling.given()
    for name in _LATE:
        if name not in given:
            continue
        if name.startswith(("json", "structural")) and merged.get(name, given[name]) != given[name]:
            raise InvalidRequest(f"{name} and response_format or tools exclude each other", param=name)
        merged[name] = given[name]
    return merged


def _model_type(request: ChatRequest | CompletionRequest) -> Any:
    from sglang.srt.entrypoints.openai import protocol

    return protocol.ChatCompletionRequest if isinstance(request, ChatRequest) else protocol.CompletionRequest


def _parse(kind: Any, fields: dict[str, Any]) -> Any:
    from pydantic import ValidationError

    missing = next((name for name in fields if name not in kind.model_fields and name not in _MOVED), None)
    if missing is not None and kind.model_config.get("extra") != "allow":  # Pydantic would drop it.
        raise NotSupported(f"{missing} is not supported by this version of SGLang", param=missing)
    try:
        return kind(**fields)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        param = _path(first["loc"]) or None
        text = safe(first["msg"], fields) or "is not valid"
        raise InvalidRequest(f"{param}: {text}" if param else text, param=param) from None
    except (AttributeError, TypeError, KeyError) as error:
        # SGLang's validators look into fields before their types are checked.
        raise InvalidRequest("a field has the wrong type") from error


def _path(location: tuple[str | int, ...]) -> str:
    """`messages[0].content`: the names of union members, which pydantic puts in between, left out."""
    path = ""
    for part in location:
        if isinstance(part, int):
            path += f"[{part}]"
        elif part.isidentifier() and not part[0].isupper() and part not in ("str", "int", "float", "bool"):
            path += f".{part}" if path else part
    return path


def _problem(problem: str, request: ChatRequest | CompletionRequest) -> InvalidRequest:
    text = safe(problem, request.messages if isinstance(request, ChatRequest) else request.prompt)
    return InvalidRequest(text or "SGLang refused the request")


def _refused(error: Exception, request: ChatRequest | CompletionRequest) -> InvalidRequest:
    """What rendering, tokenising or converting this request raised: the caller's fault, whatever the class.

    A template refuses a conversation by an exception, and mistral's tokenizers have their own classes.
    """
    detail = getattr(error, "detail", None) or error
    content = request.messages if isinstance(request, ChatRequest) else request.prompt
    text = safe(detail, [content, getattr(request, "tools", None)])
    log.info("request.refused", kind=request.kind, error=type(error).__name__)
    param = _prompt_field(request)
    return InvalidRequest(
        f"{param} could not be rendered for this model: {text or type(error).__name__}", param=param
    )


def _prompt_field(request: ChatRequest | CompletionRequest) -> str:
    return "messages" if isinstance(request, ChatRequest) else "prompt"
