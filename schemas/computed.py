"""Requests that are answered in one piece: embeddings, and the two ways through the model's tokenizer.

Nothing is generated for them, so they have no sampling parameters and no chunks. They are as lenient, and as
strict, as the other requests.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Final, Literal

import msgspec
from msgspec import Meta

from inferbus.schemas import codec, limits, requests
from inferbus.schemas.errors import InvalidRequest, NotSupported, WrongKind
from inferbus.schemas.requests import ChatRequest
from inferbus.schemas.sampling import INT64, TokenId, integral
from inferbus.schemas.subjects import ComputedKind, Kind

EncodingFormat = Literal["float", "base64"]


class ComputedRequest(msgspec.Struct, omit_defaults=True, kw_only=True):
    """What these kinds share.

    Attributes:
        model: Must be the subject's model where it is given, or name an adapter of it: `model:adapter`.
        stream: Not true: the answer comes in one piece.
        user: Passed over.
        warnings: What was ignored; sent with the answer.
    """

    kind: ClassVar[ComputedKind]
    essential: ClassVar[tuple[str, ...]]

    model: str | None = None
    stream: bool | None = None
    user: str | None = None
    warnings: list[str] = []

    def check(self) -> None:
        """Checks what needs no model.

        Raises:
            InvalidRequest: `param` names the field.
        """
        if self.stream:
            raise InvalidRequest(f"an answer of the kind {self.kind!r} comes in one piece", param="stream")


class EmbeddingsRequest(ComputedRequest, omit_defaults=True, kw_only=True):
    """OpenAI's embeddings request.

    Attributes:
        input: A text, several, a list of token ids, or several.
        encoding_format: `float`, or `base64`: little-endian 32-bit floats.
        dimensions: Of each embedding, where the model was trained for several.
        priority: Higher first, where the engine schedules by priority.
        lora_path: Name of a loaded adapter.
    """

    kind = "embeddings"
    essential = ("input",)

    input: str | Annotated[list[str | TokenId | list[TokenId]], Meta(min_length=1)]
    encoding_format: EncodingFormat = "float"
    dimensions: Annotated[int, Meta(ge=1)] | None = None
    priority: Annotated[int, Meta(ge=INT64.start, le=INT64.stop - 1)] | None = None
    lora_path: str | None = None

    @property
    def inputs(self) -> Iterator[tuple[str, str | list[int]]]:
        """Every input with the path of its field."""
        given: Any = self.input
        if isinstance(given, str) or isinstance(given[0], int):
            yield "input", given
        else:
            yield from ((f"input[{i}]", each) for i, each in enumerate(given))

    def check(self) -> None:
        """See `ComputedRequest.check`."""
        super().check()
        if isinstance(self.input, list):
            kind = type(self.input[0])
            other = next((i for i, each in enumerate(self.input) if type(each) is not kind), None)
            if other is not None:
                message = "input must be texts, or token ids, or lists of token ids"
                raise InvalidRequest(message, param=f"input[{other}]")
            most = limits.PROMPT_TOKENS if kind is int else limits.EMBEDDING_INPUTS
            if len(self.input) > most:
                raise InvalidRequest(f"input has {len(self.input)} items; at most {most}", param="input")
        for param, text in self.inputs:
            if not text or (isinstance(text, str) and not text.strip()):
                raise InvalidRequest(f"{param} must not be empty", param=param)


class TokenizeRequest(ComputedRequest, omit_defaults=True, kw_only=True):
    """SGLang's request for the tokens of a text, of several, or of the messages of a chat.

    Attributes:
        prompt: The text, or several.
        messages: Instead of a text: rendered and tokenised as for a chat completion.
        add_special_tokens: Whether a text gets the tokens that the model begins or ends one with.
        add_generation_prompt: Of messages: given to the chat template.
        chat: The messages, with the other fields of a chat request that bear on their rendering.
    """

    kind = "tokenize"
    essential = ("prompt", "messages")

    prompt: str | Annotated[list[str], Meta(min_length=1, max_length=limits.TEXTS)] | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    chat: ChatRequest | None = None

    def check(self) -> None:
        """See `ComputedRequest.check`."""
        super().check()
        if self.prompt is not None and self.messages is not None:
            raise InvalidRequest("prompt and messages exclude each other", param="messages")


class DetokenizeRequest(ComputedRequest, omit_defaults=True, kw_only=True):
    """SGLang's request for the text of tokens.

    Attributes:
        tokens: Token ids, or several lists of them.
        skip_special_tokens: Whether tokens that are no text are left out.
    """

    kind = "detokenize"
    essential = ("tokens",)

    tokens: Annotated[list[TokenId | list[TokenId]], Meta(max_length=limits.PROMPT_TOKENS)]
    skip_special_tokens: bool = True

    @property
    def lists(self) -> Iterator[tuple[str, list[int]]]:
        """Every list of tokens with the path of its field."""
        given: Any = self.tokens
        if given and isinstance(given[0], list):
            yield from ((f"tokens[{i}]", each) for i, each in enumerate(given))
        else:
            yield "tokens", given

    @property
    def several(self) -> bool:
        """Whether the answer is a list of texts."""
        return bool(self.tokens) and isinstance(self.tokens[0], list)

    def check(self) -> None:
        """See `ComputedRequest.check`."""
        super().check()
        several = self.several
        other = next((i for i, each in enumerate(self.tokens) if isinstance(each, list) != several), None)
        if other is not None:
            raise InvalidRequest("tokens must be token ids, or lists of them", param=f"tokens[{other}]")


AnyComputed = EmbeddingsRequest | TokenizeRequest | DetokenizeRequest

TYPES: Final[dict[ComputedKind, type[AnyComputed]]] = {
    "embeddings": EmbeddingsRequest,
    "tokenize": TokenizeRequest,
    "detokenize": DetokenizeRequest,
}

UNSUPPORTED: Final = {"embed_overrides": "embeddings", "embed_override_token_id": "embeddings"}
"""Fields of SGLang's that would change the answer, and are not served."""

FILLED_IN: Final = frozenset({"warnings", "chat"})
"""Fields that no body has: the reader fills them in."""

_INTS: Final = frozenset({"dimensions", "priority"})


def parse(kind: ComputedKind, fields: dict[str, Any], *, model: str | None = None) -> AnyComputed:
    """The request in a decoded body; see `inferbus.schemas.kinds.parse`."""
    struct = TYPES[kind]
    _check_kind(struct, fields)
    given = {name: value for name, value in fields.items() if value is not None}
    if refused := next((name for name in given if UNSUPPORTED.get(name) == kind), None):
        raise NotSupported(f"{refused} is not supported", param=refused)
    known = frozenset(struct.__struct_fields__) - FILLED_IN
    own = {name: value for name, value in given.items() if name in known}
    own |= {name: integral(own[name]) for name in _INTS & own.keys()}
    rest = {name: value for name, value in given.items() if name not in known}
    try:
        request = msgspec.convert(own, struct)
    except msgspec.ValidationError as error:
        message, param = codec.split_path(str(error))
        raise InvalidRequest(message, param=param) from None
    if isinstance(request, TokenizeRequest) and request.messages is not None:
        chat = requests.parse("chat", rest | {"messages": request.messages})
        assert isinstance(chat, ChatRequest)
        request.chat, request.warnings = chat, chat.warnings
    else:
        unknown = [f"unknown field {codec.bounded(name)!r} ignored" for name in rest]
        request.warnings = requests.bounded(unknown)
    if model is not None:
        own_adapter = request.lora_path if isinstance(request, EmbeddingsRequest) else None
        adapter = requests.chosen_adapter(request.model, model, own_adapter)
        if isinstance(request, EmbeddingsRequest):
            # The tokenizer is the model's, whatever the adapter.
            request.lora_path = adapter
    request.check()
    return request


def _check_kind(struct: type[AnyComputed], fields: dict[str, Any]) -> None:
    if any(fields.get(name) is not None for name in struct.essential):
        return
    places: list[tuple[Kind, str]] = [*requests.ESSENTIAL.items()]
    places += [(other.kind, name) for other in TYPES.values() for name in other.essential]
    if found := next((kind for kind, name in places if fields.get(name) is not None), None):
        message = f"a body of the kind {found!r} came on a subject of the kind {struct.kind!r}"
        raise WrongKind(message, param=struct.essential[0])
    raise InvalidRequest(f"{' or '.join(struct.essential)} is missing", param=struct.essential[0])
