"""The part of OpenAI's API that the gateway serves, as an OpenAPI document for `schemathesis`.

Only what all engines take is named, so that a request of it is answered or refused, and nothing else. Bodies
may have further fields: OpenAI's has more, and ours names those that it ignores.
"""

from __future__ import annotations

from typing import Any, Final

_TEXT: Final = {"type": "string", "maxLength": 200}
_WORD: Final = {"type": "string", "pattern": r"^[a-z][a-z ]{0,20}$"}
_COUNT: Final = {"type": "integer", "minimum": 0}
_SAMPLING: Final = {
    "max_tokens": {"type": ["integer", "null"], "minimum": 1, "maximum": 32},
    "temperature": {"type": ["number", "null"], "minimum": 0, "maximum": 2},
    "top_p": {"type": ["number", "null"], "exclusiveMinimum": 0, "maximum": 1},
    "n": {"type": ["integer", "null"], "minimum": 1, "maximum": 3},
    "seed": {"type": ["integer", "null"], "minimum": -(2**31), "maximum": 2**31},
    "presence_penalty": {"type": ["number", "null"], "minimum": -2, "maximum": 2},
    "frequency_penalty": {"type": ["number", "null"], "minimum": -2, "maximum": 2},
    "user": {"type": "string", "maxLength": 20},
}
_MESSAGE: Final = {
    "type": "object",
    "required": ["role", "content"],
    "additionalProperties": False,
    "properties": {"role": {"enum": ["system", "user", "assistant"]}, "content": _TEXT},
}
_USAGE: Final = {
    "type": "object",
    "required": ["prompt_tokens", "total_tokens"],
    "properties": dict.fromkeys(("prompt_tokens", "completion_tokens", "total_tokens"), _COUNT),
}
ERROR: Final = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string", "minLength": 1},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}


def _answer(kind: str, choice: dict[str, Any]) -> dict[str, Any]:
    return {
        "type": "object",
        "required": ["id", "object", "created", "model", "choices", "usage"],
        "properties": {
            "object": {"const": kind},
            "created": _COUNT,
            "choices": {
                "type": "array",
                "minItems": 1,
                "items": {
                    "type": "object",
                    "required": ["index", "finish_reason", *choice],
                    "properties": {"finish_reason": {"enum": ["stop", "length"]}, **choice},
                },
            },
            "usage": _USAGE,
        },
    }


def _post(
    model: str, required: list[str], properties: dict[str, Any], answer: dict[str, Any]
) -> dict[str, Any]:
    body = {
        "type": "object",
        "required": ["model", *required],
        "additionalProperties": False,
        "properties": {"model": {"const": model}, **properties},
    }
    return {
        "post": {
            "requestBody": {"required": True, "content": {"application/json": {"schema": body}}},
            "responses": _responses(answer),
        }
    }


def _responses(answer: dict[str, Any]) -> dict[str, Any]:
    refused = {"description": "refused", "content": {"application/json": {"schema": ERROR}}}
    return {
        "200": {"description": "answered", "content": {"application/json": {"schema": answer}}},
        **dict.fromkeys(("400", "404", "413", "415", "422"), refused),
    }


def document(talker: str, vectors: str) -> dict[str, Any]:
    """The document.

    Args:
        talker: A model that generates.
        vectors: An embedding model.
    """
    prompt = {"anyOf": [{**_TEXT, "minLength": 1}, _ids()]}
    message = {"message": {"type": "object", "required": ["role", "content"]}}
    tokens = {"anyOf": [_ids(), {"type": "array", "items": _ids(), "maxItems": 3}]}
    listed = {"type": "object", "required": ["object", "data"], "properties": {"object": {"const": "list"}}}
    return {
        "openapi": "3.1.0",
        "info": {"title": "What the gateway serves of OpenAI's API", "version": "1"},
        "paths": {
            "/v1/chat/completions": _post(
                talker,
                ["messages"],
                {"messages": {"type": "array", "minItems": 1, "maxItems": 4, "items": _MESSAGE}, **_SAMPLING},
                _answer("chat.completion", message),
            ),
            "/v1/completions": _post(
                talker,
                ["prompt"],
                {"prompt": prompt, "echo": {"type": ["boolean", "null"]}, **_SAMPLING},
                _answer("text_completion", {"text": {"type": "string"}}),
            ),
            "/v1/embeddings": _post(
                vectors,
                ["input"],
                {
                    "input": {
                        "anyOf": [
                            _WORD,
                            {"type": "array", "items": _WORD, "minItems": 1, "maxItems": 4},
                            _ids(),
                        ]
                    },
                    "encoding_format": {"enum": ["float", "base64"]},
                },
                {**listed, "required": ["object", "data", "model", "usage"]},
            ),
            "/v1/tokenize": _post(
                talker, ["prompt"], {"prompt": _TEXT}, {"type": "object", "required": ["tokens", "count"]}
            ),
            "/v1/detokenize": _post(
                talker, ["tokens"], {"tokens": tokens}, {"type": "object", "required": ["text"]}
            ),
            "/v1/models": {"get": {"responses": _responses(listed)}},
            "/v1/models/{model}": {
                "get": {
                    "parameters": [{"name": "model", "in": "path", "required": True, "schema": _TEXT}],
                    "responses": _responses({"type": "object", "required": ["id", "object", "created"]}),
                }
            },
        },
    }


def _ids() -> dict[str, Any]:
    """Named one by one: to a schema 65.0 is an integer, too."""
    return {"type": "array", "items": {"enum": [0, 10, 65, 97, 255]}, "minItems": 1, "maxItems": 8}
