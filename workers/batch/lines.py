"""The lines of a batch, and what can be wrong with them."""

from __future__ import annotations

from typing import Any, Final

import msgspec

from inferbus.schemas.subjects import Kind
from inferbus.workers.client.models import of_its_model

KINDS: Final[dict[str, Kind]] = {
    "/v1/chat/completions": "chat",
    "/v1/completions": "completions",
    "/v1/tokens": "tokens",
    "/v1/embeddings": "embeddings",
    "/v1/tokenize": "tokenize",
    "/v1/detokenize": "detokenize",
}
"""The kind of request behind each url of a line."""

URLS: Final[dict[Kind, str]] = {kind: url for url, kind in KINDS.items()}

CUSTOM_ID_CHARS: Final = 512


class Problem(msgspec.Struct, frozen=True, kw_only=True):
    """Why a line cannot be run, as OpenAI's batch object has it.

    Attributes:
        code: `invalid_json_line`, `missing_required_parameter`, `invalid_value`, `invalid_method`,
            `invalid_url`, `url_mismatch`, `model_mismatch`, `missing_model`, `duplicate_custom_id` or
            `empty_file`.
        message: For people.
        line: Its number; None for the whole file.
        param: The field at fault.
    """

    code: str
    message: str
    line: int | None = None
    param: str | None = None


class Line(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One line that can be run.

    Attributes:
        number: In its file, from 1.
        custom_id: The caller's name for it.
        kind: Of the request.
        model: That it names; None: none.
        body: The request, as the file has it.
    """

    number: int
    custom_id: str
    kind: Kind
    model: str | None
    body: msgspec.Raw


class _Fields(msgspec.Struct, gc=False):
    custom_id: Any = None
    method: Any = "POST"
    url: Any = None
    body: msgspec.Raw = msgspec.Raw(b"null")
    inferbus_problem: Problem | None = None


class _Body(msgspec.Struct, gc=False):
    model: Any = None


_fields: Final = msgspec.json.Decoder(_Fields)
_body: Final = msgspec.json.Decoder(_Body)


class Unusable(Exception):
    """A line that cannot be run.

    Args:
        problem: Why.
        custom_id: Of the line, where it has one.
    """

    def __init__(self, problem: Problem, custom_id: str | None = None) -> None:
        super().__init__(problem.message)
        self.problem = problem
        self.custom_id = custom_id


def problem_line(problem: Problem, custom_id: str | None) -> bytes:
    """A line that says why it is no request, for a row of which none can be made; `parse` raises that."""
    return msgspec.json.encode({"custom_id": custom_id, "inferbus_problem": problem})


def parse(number: int, data: bytes) -> Line:
    """A line, checked as far as that goes without a worker.

    Raises:
        Unusable: Says why.
    """
    try:
        fields = _fields.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        message = "the line is not a JSON object"
        raise Unusable(Problem(code="invalid_json_line", message=message, line=number)) from None
    custom_id = fields.custom_id
    if (found := fields.inferbus_problem) is not None:
        raise _unusable(number, fields, found.code, found.message, found.param)
    if not isinstance(custom_id, str) or not custom_id:
        raise _unusable(number, fields, "missing_required_parameter", "custom_id must be a text", "custom_id")
    if len(custom_id) > CUSTOM_ID_CHARS:
        message = f"custom_id has at most {CUSTOM_ID_CHARS} characters"
        raise _unusable(number, fields, "invalid_value", message, "custom_id")
    if fields.method != "POST":
        raise _unusable(number, fields, "invalid_method", "method must be POST", "method")
    kind = KINDS.get(fields.url) if isinstance(fields.url, str) else None
    if kind is None:
        raise _unusable(number, fields, "invalid_url", f"url must be one of {', '.join(KINDS)}", "url")
    try:
        model = _body.decode(fields.body).model
    except (msgspec.DecodeError, RecursionError):
        message = "body must be an object"
        raise _unusable(number, fields, "missing_required_parameter", message, "body") from None
    if model is not None and not isinstance(model, str):
        raise _unusable(number, fields, "invalid_value", "model must be a text", "body.model")
    return Line(number=number, custom_id=custom_id, kind=kind, model=model or None, body=fields.body)


def _unusable(number: int, fields: _Fields, code: str, message: str, param: str | None) -> Unusable:
    named = fields.custom_id if isinstance(fields.custom_id, str) else None
    return Unusable(Problem(code=code, message=message, line=number, param=param), named)


class Expected(msgspec.Struct, frozen=True, kw_only=True):
    """What all lines of a batch have in common; None: what the first line has.

    Attributes:
        kind: Of the requests.
        model: The served model.
        any_model: The model is given, whatever the lines name.
        served: The models that have workers. A first line that names `model:adapter` means one of them.
    """

    kind: Kind | None = None
    model: str | None = None
    any_model: bool = False
    served: tuple[str, ...] = ()

    def check(self, line: Line) -> Expected:
        """What is expected of the lines after this one.

        Raises:
            Unusable: The line differs.
        """
        if self.kind not in (None, line.kind):
            raise _differs("url_mismatch", "all lines of a batch have one url", line, "url")
        model = self.model if self.any_model or line.model is None else line.model
        if model is None:
            raise _differs("missing_model", "neither the line nor --model names a model", line, "body.model")
        if self.model not in (None, model) and not names_adapter(model, self.model):
            raise _differs("model_mismatch", "all lines of a batch have one model", line, "body.model")
        if self.kind is not None and self.model is not None:
            return self
        if self.model is None:
            model = of_its_model(model, self.served)
        return Expected(kind=line.kind, model=self.model or model, any_model=self.any_model)


def names_adapter(name: str | None, model: str | None) -> bool:
    """Whether a line's model is an adapter of the batch's: `model:adapter`."""
    return None not in (name, model) and str(name).startswith(f"{model}:")


def _differs(code: str, message: str, line: Line, param: str) -> Unusable:
    return Unusable(Problem(code=code, message=message, line=line.number, param=param), line.custom_id)
