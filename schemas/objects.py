"""Bodies that are too large for one message: stored in parts, and named by a header.

A request, result or whole answer over the server's `max_payload` travels as an object of the stream
`INFER_OBJECTS`: its parts are messages on `infer.objects.<owner>.<object>.<part>`, and the message itself has
an empty body and the header `Infer-Object`. Not NATS's own Object Store (ADR-20): its subjects name a bucket
and an object, so that no permission could keep the owners of one bucket apart.
"""

from __future__ import annotations

import hashlib
import re
import secrets
from collections.abc import Mapping
from typing import Final

import msgspec

from inferbus.schemas import limits
from inferbus.schemas.errors import InvalidRequest

OBJECT: Final = "Infer-Object"
"""On a message with an empty body: the object that is its body, as `<id> <parts> <bytes> <sha256>`."""

_REFERENCE: Final = re.compile(r"([0-9a-f]{32}) ([1-9][0-9]{0,5}) ([0-9]{1,12}) ([0-9a-f]{64})")


class ObjectRef(msgspec.Struct, frozen=True):
    """What a reader needs to fetch an object and to check it.

    Attributes:
        id: Random, so that nobody else can write to its subjects beforehand.
        parts: Number of its messages.
        size: Bytes.
        digest: SHA-256, in hexadecimal.
    """

    id: str
    parts: int
    size: int
    digest: str

    def __str__(self) -> str:
        return f"{self.id} {self.parts} {self.size} {self.digest}"

    @classmethod
    def of(cls, data: bytes, *, part: int) -> ObjectRef:
        """A new reference to a body that is stored in parts of so many bytes."""
        parts = max(1, -(-len(data) // part))
        return cls(secrets.token_hex(16), parts, len(data), hashlib.sha256(data).hexdigest())

    def describes(self, data: bytes) -> bool:
        """Whether this is the object's content."""
        return len(data) == self.size and hashlib.sha256(data).hexdigest() == self.digest


def parse_object(headers: Mapping[str, str] | None) -> ObjectRef | None:
    """The object that is a message's body; None where the body is in the message itself.

    Raises:
        InvalidRequest: The header is there, and unreadable, or names an object over `limits.OBJECT_BYTES`.
    """
    text = (headers or {}).get(OBJECT)
    if text is None:
        return None
    found = _REFERENCE.fullmatch(text)
    if found is None:
        raise InvalidRequest(f"{OBJECT} must be an id, a number of parts, a size and a digest", param=OBJECT)
    reference = ObjectRef(found[1], int(found[2]), int(found[3]), found[4])
    if reference.size > limits.OBJECT_BYTES or reference.parts > reference.size + 1:
        raise InvalidRequest(f"an object has at most {limits.OBJECT_BYTES} bytes", param=OBJECT)
    return reference


def object_header(reference: ObjectRef | None) -> dict[str, str]:
    """The header that names the object which is a message's body, if there is one."""
    return {} if reference is None else {OBJECT: str(reference)}
