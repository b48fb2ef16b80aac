"""The way into a scripted engine: a request checked, rendered and tokenised."""

from __future__ import annotations

import copy
from typing import Any, Final, NamedTuple

import msgspec

from inferbus.schemas.errors import ContextLengthExceeded, InvalidRequest, NotSupported
from inferbus.schemas.requests import AnyRequest, ChatRequest, CompletionRequest, TokenRequest
from inferbus.workers.engine.interface import AnswerFormatter, AnswerIdentity, EngineInfo, Leg
from inferbus.workers.engine.scripted.answers import TextAnswer
from inferbus.workers.engine.scripted.script import USER
from inferbus.workers.engine.scripted.text import ByteTokenizer
from inferbus.workers.engine.tokens import TokensAnswer, asks_logprobs

_OF_TEXT: Final = ("stop", "stop_regex", "json_schema", "regex", "ebnf", "structural_tag")


class Checked(NamedTuple):
    """A request's prompts, and what of each is echoed."""

    prompts: list[list[int]]
    echoes: list[str]


class ScriptedPrompt:
    """`inferbus.workers.engine.interface.Prompt`."""

    def __init__(
        self,
        request: AnyRequest,
        checked: Checked,
        model: str,
        *,
        tokenizer: ByteTokenizer,
    ) -> None:
        self._request = request
        self._prompts, self._echoes = checked
        self._left = request.sampling.max_new_tokens
        self._tokenizer = tokenizer
        self._model = model

    @property
    def token_ids(self) -> list[int]:
        """The prompt's tokens."""
        return self._prompts[0]

    @property
    def choices(self) -> int:
        """How many legs it takes."""
        return self._request.sampling.choices * len(self._prompts)

    def leg(self, index: int, *, rid: str) -> Leg:
        """The engine call of one choice."""
        which, choice = divmod(index, self._request.sampling.choices)
        sampling = self._request.sampling.given()
        sampling.pop("n", None)
        if self._left is not None:
            sampling["max_new_tokens"] = self._left
        if (seed := sampling.get("sampling_seed")) is not None:
            sampling["sampling_seed"] = seed + choice
        options: dict[str, Any] = {}
        if self._request.user is not None:
            options[USER] = self._request.user
        if isinstance(self._request, TokenRequest) and self._request.logprobs:
            options |= {"return_logprob": True, "top_logprobs_num": self._request.top_logprobs or 0}
        return Leg(rid=rid, index=index, token_ids=self._prompts[which], sampling=sampling, options=options)

    def resumed(self, token_ids: list[int], text: str) -> ScriptedPrompt | None:
        """See `Prompt.resumed`."""
        sampling = self._request.sampling
        left = None if sampling.max_new_tokens is None else sampling.max_new_tokens - len(token_ids)
        if self.choices > 1 or asks_logprobs(self._request) or (left is not None and left < 1):
            return None
        if self._request.kind != "tokens" and self._echoes[0] + self._tokenizer.decode(token_ids) != text:
            return None
        resumed = copy.copy(self)
        resumed._prompts = [self._prompts[0] + token_ids]
        resumed._left = left
        return resumed

    def answer(self, identity: AnswerIdentity | None = None) -> AnswerFormatter:
        """A fresh formatter."""
        request = self._request
        if isinstance(request, TokenRequest):
            return TokensAnswer(request, prompt_tokens=len(self.token_ids), choices=self.choices)
        options = request.stream_options
        return TextAnswer(
            request.kind,
            model=self._model,
            identity=identity or AnswerIdentity.new(),
            prompt_tokens=sum(map(len, self._prompts)),
            choices=self.choices,
            include_usage=bool(options and options.include_usage),
            echoes=[echo for echo in self._echoes for _ in range(request.sampling.choices)],
        )


def prepare(request: AnyRequest, info: EngineInfo, tokenizer: ByteTokenizer) -> Checked:
    """Checks, renders and tokenises a request.

    Raises:
        CallerError: It cannot be served.
    """
    if request.kind not in info.kinds:
        raise NotSupported(f"this engine does not serve the kind {request.kind!r}")
    _refuse_unsupported(request)
    request.sampling.check_vocabulary(info.capacity.vocabulary)
    if isinstance(request, ChatRequest):
        prompts = [request.input_ids or tokenizer.encode(render(request))]
    elif isinstance(request, CompletionRequest):
        prompts = [tokenizer.encode(each) if isinstance(each, str) else each for each in request.prompts]
    else:
        prompts = [request.token_ids]
    for token_ids in prompts:
        _check_prompt(request, token_ids, info)
    echoed = isinstance(request, CompletionRequest) and request.echo
    return Checked(prompts, [tokenizer.decode(token_ids) if echoed else "" for token_ids in prompts])


def _check_prompt(request: AnyRequest, token_ids: list[int], info: EngineInfo) -> None:
    if max(token_ids) >= info.capacity.vocabulary or min(token_ids) < 0:
        field = "prompt" if isinstance(request, CompletionRequest) else "token_ids"
        raise InvalidRequest(
            f"{field} holds a token id outside the vocabulary (0 to {info.capacity.vocabulary - 1})",
            param=field,
        )
    wanted = len(token_ids) + (request.sampling.max_new_tokens or 1)
    if wanted > info.capacity.context_length:
        raise ContextLengthExceeded(
            f"prompt and max_tokens come to {wanted} tokens, the context has {info.capacity.context_length}",
            prompt=len(token_ids),
            total=wanted,
        )


def _refuse_unsupported(request: AnyRequest) -> None:
    """Refuses parameters that a script cannot follow; none is ignored silently."""
    given = [name for name in _OF_TEXT if getattr(request.sampling, name)]
    if not isinstance(request, TokenRequest):
        given += [name for name in ("tools", "response_format") if getattr(request, name, None)]
        given += ["logprobs"] * asks_logprobs(request)
        given += [
            name for name in request.__struct_fields__ if name[:7] == "return_" and getattr(request, name)
        ]
    given += ["lora_path"] * (request.lora_path is not None)
    if given:
        raise NotSupported(f"{given[0]} is not supported by a scripted engine", param=given[0])


def render(request: ChatRequest) -> str:
    """The messages of a chat as the text that the script is asked with."""
    lines = [f"{message['role']}: {_content(i, message)}\n" for i, message in enumerate(request.messages)]
    return "".join([*lines, "assistant: "])


def _content(position: int, message: dict[str, Any]) -> str:
    content = message.get("content")
    if isinstance(content, list):
        for part in content:
            if part["type"] != "text":
                raise NotSupported("only text is supported", param=f"messages[{position}].content")
        content = "".join(part["text"] for part in content)
    calls = message.get("tool_calls")
    return (content or "") + (msgspec.json.encode(calls).decode() if calls else "")
