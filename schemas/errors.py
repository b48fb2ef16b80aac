"""What can go wrong with a request, whose fault it is, and what becomes of its message.

    InferbusError
    ├── CallerError          the caller's; answered, stored as the result, acknowledged, never retried
    │   ├── UndecodableBody          undecodable_body
    │   ├── UnsupportedContentType   unsupported_content_type
    │   ├── WrongKind                wrong_kind
    │   ├── InvalidRequest           invalid_request
    │   ├── ContextLengthExceeded    context_length_exceeded
    │   ├── PayloadTooLarge          payload_too_large
    │   ├── InvalidSubject           invalid_subject
    │   ├── InvalidReplySubject      invalid_reply_subject
    │   ├── ModelNotFound            model_not_found
    │   └── NotSupported             not_supported
    ├── Ended                nobody's; the job was told to end; answered and acknowledged
    │   ├── Cancelled                cancelled
    │   └── DeadlineExceeded         deadline_exceeded
    ├── InfrastructureError  a part beside this worker failed; retried elsewhere or later
    │   ├── Overloaded               overloaded
    │   ├── PrefillUnavailable       prefill_unavailable
    │   ├── PrefillFailed            prefill_failed
    │   ├── TransferFailed           kv_transfer_failed
    │   ├── Draining                 draining
    │   ├── LeaseLost                lease_lost
    │   ├── NoWorker                 no_worker
    │   ├── Misdirected              misdirected
    │   └── BusUnavailable           bus_unavailable
    └── WorkerError          this worker's; retried elsewhere, dead-lettered after the last attempt
        ├── EngineFailed             engine_failed
        ├── AttemptsExhausted        attempts_exhausted
        └── InternalError            internal_error

The lifecycle code switches on the class; nothing ever looks at a message's text.
"""

from __future__ import annotations

from typing import Any, ClassVar

import msgspec


class ErrorBody(msgspec.Struct, omit_defaults=True, kw_only=True):
    """The inside of an error answer.

    Attributes:
        code: Stable, machine-readable.
        message: For a person; names the field at fault where there is one. Never holds request content.
        param: The field at fault, as a path (`sampling_params.top_p`).
        retryable: Whether the same request may succeed when sent again.
        type: As OpenAI's API tells errors apart: `invalid_request_error` or `server_error`.
    """

    code: str
    message: str
    param: str | None = None
    # By a factory, since a plain default is omitted, and readers in other languages rely on the field.
    retryable: bool = msgspec.field(default_factory=bool)
    type: str | None = None


class ErrorAnswer(msgspec.Struct, omit_defaults=True, kw_only=True):
    """An error answer: `{"error": {...}}`, with the job's identity where it is known."""

    error: ErrorBody
    job: str | None = None
    attempt: int | None = None


class InferbusError(Exception):
    """Anything inferbus says of a request. `code` is stable; `retryable` says whether to send it again."""

    code: ClassVar[str] = "error"
    retryable: ClassVar[bool] = False
    openai_type: ClassVar[str] = "invalid_request_error"

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param

    def body(self) -> ErrorBody:
        """The error as it goes over the wire."""
        return ErrorBody(
            code=self.code,
            message=self.message,
            param=self.param,
            retryable=self.retryable,
            type=self.openai_type,
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.message, self.param)


def _rebuild(kind: type[InferbusError], message: str, param: str | None) -> InferbusError:
    return kind(message, param=param)


class CallerError(InferbusError):
    """The caller's fault."""

    code = "caller_error"


class UndecodableBody(CallerError):
    """The body is not what its content type says."""

    code = "undecodable_body"


class UnsupportedContentType(CallerError):
    """Neither `application/json` nor `application/msgpack`."""

    code = "unsupported_content_type"


class WrongKind(CallerError):
    """The body is another kind's than the subject's."""

    code = "wrong_kind"


class InvalidRequest(CallerError):
    """A field is missing, of the wrong type, out of range or too large."""

    code = "invalid_request"


class ContextLengthExceeded(CallerError):
    """Prompt and requested tokens do not fit the model's context, or an engine's KV cache.

    Attributes:
        prompt: Tokens of the prompt; 0 where they are not known.
        total: Tokens of the prompt and of the answer that was asked for.
    """

    code = "context_length_exceeded"

    def __init__(self, message: str, *, param: str | None = None, prompt: int = 0, total: int = 0) -> None:
        super().__init__(message, param=param)
        self.prompt = prompt
        self.total = total


class PayloadTooLarge(CallerError):
    """A message is over the server's `max_payload`."""

    code = "payload_too_large"


class InvalidSubject(CallerError):
    """A model name, owner or job id that no subject can carry, or a subject that is not of the contract."""

    code = "invalid_subject"


class InvalidReplySubject(CallerError):
    """A reply subject that a worker must not publish to."""

    code = "invalid_reply_subject"


class ModelNotFound(CallerError):
    """The body names another model than the subject's."""

    code = "model_not_found"


class NotSupported(CallerError):
    """Well-formed, but this model's workers cannot serve it."""

    code = "not_supported"


class Ended(InferbusError):
    """The job was told to end."""

    code = "ended"


class Cancelled(Ended):
    """Cancelled by its owner, or its caller is gone."""

    code = "cancelled"


class DeadlineExceeded(Ended):
    """Its deadline passed."""

    code = "deadline_exceeded"


class InfrastructureError(InferbusError):
    """A part beside this worker failed."""

    code = "infrastructure_error"
    retryable = True
    openai_type = "server_error"


class Overloaded(InfrastructureError):
    """No free slot."""

    code = "overloaded"


class PrefillUnavailable(InfrastructureError):
    """No prefill worker that fits is there, or none took the hand-off."""

    code = "prefill_unavailable"


class PrefillFailed(InfrastructureError):
    """The prefill leg failed after it was taken."""

    code = "prefill_failed"


class TransferFailed(InfrastructureError):
    """The KV cache did not arrive."""

    code = "kv_transfer_failed"


class Draining(InfrastructureError):
    """The worker is shutting down."""

    code = "draining"


class LeaseLost(InfrastructureError):
    """The worker was out of touch for so long that the job may be another's by now."""

    code = "lease_lost"


class NoWorker(InfrastructureError):
    """Nobody serves this model and kind at the moment."""

    code = "no_worker"


class Misdirected(InfrastructureError):
    """This worker cannot serve the request, another worker of the model can.

    Attributes:
        to: The other worker; empty where the error was read from an answer.
    """

    code = "misdirected"

    def __init__(self, message: str, *, param: str | None = None, to: str = "") -> None:
        super().__init__(message, param=param)
        self.to = to


class BusUnavailable(InfrastructureError):
    """NATS, or JetStream, did not answer."""

    code = "bus_unavailable"


class WorkerError(InferbusError):
    """This worker's fault."""

    code = "worker_error"
    retryable = True
    openai_type = "server_error"


class EngineFailed(WorkerError):
    """The engine gave up on the request."""

    code = "engine_failed"


class AttemptsExhausted(WorkerError):
    """Every worker that took the job died with it."""

    code = "attempts_exhausted"
    retryable = False


class InternalError(WorkerError):
    """A defect of inferbus."""

    code = "internal_error"


def _leaves(kind: type[InferbusError]) -> list[type[InferbusError]]:
    below = kind.__subclasses__()
    return [kind, *(leaf for child in below for leaf in _leaves(child))]


BY_CODE: dict[str, type[InferbusError]] = {kind.code: kind for kind in _leaves(InferbusError)}
"""Every error class by its code."""

CODES: tuple[str, ...] = tuple(code for code, kind in BY_CODE.items() if not kind.__subclasses__())
"""The codes that errors have; those of the classes above them name groups."""


def from_body(body: ErrorBody) -> InferbusError:
    """The error that a body tells of; an unknown code of a newer peer becomes its nearest base class."""
    kind = BY_CODE.get(body.code) or (InfrastructureError if body.retryable else CallerError)
    return kind(body.message, param=body.param)
