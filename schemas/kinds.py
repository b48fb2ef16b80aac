"""Every kind of request: its struct, and the one function that reads a body."""

from __future__ import annotations

from typing import Any, Final, overload

from inferbus.schemas import codec, computed, requests
from inferbus.schemas.computed import AnyComputed
from inferbus.schemas.requests import AnyRequest
from inferbus.schemas.subjects import COMPUTED, GENERATED, ComputedKind, GeneratedKind, Kind

WireRequest = AnyRequest | AnyComputed
"""A request of any kind, as it comes over the wire."""

ESSENTIAL: Final[dict[Kind, str]] = {
    **requests.ESSENTIAL,
    **{kind: struct.essential[0] for kind, struct in computed.TYPES.items()},
}
"""The field without which a body of a kind is none; `tokenize` takes `messages` as well."""


@overload
def read(
    kind: GeneratedKind, body: bytes, *, content_type: str = codec.JSON, model: str | None = None
) -> AnyRequest: ...
@overload
def read(
    kind: ComputedKind, body: bytes, *, content_type: str = codec.JSON, model: str | None = None
) -> AnyComputed: ...
@overload
def read(
    kind: Kind, body: bytes, *, content_type: str = codec.JSON, model: str | None = None
) -> WireRequest: ...
def read(kind: Kind, body: bytes, *, content_type: str = codec.JSON, model: str | None = None) -> WireRequest:
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
        NotSupported: A field asks for what is not served.
    """
    return parse(kind, codec.decode_object(body, content_type), model=model)


@overload
def parse(kind: GeneratedKind, fields: dict[str, Any], *, model: str | None = None) -> AnyRequest: ...
@overload
def parse(kind: ComputedKind, fields: dict[str, Any], *, model: str | None = None) -> AnyComputed: ...
@overload
def parse(kind: Kind, fields: dict[str, Any], *, model: str | None = None) -> WireRequest: ...
def parse(kind: Kind, fields: dict[str, Any], *, model: str | None = None) -> WireRequest:
    """`read`, of a body that is decoded already."""
    if kind in COMPUTED:
        return computed.parse(kind, fields, model=model)
    assert kind in GENERATED
    return requests.parse(kind, fields, model=model)
