"""The HTTP status of every error, for whoever speaks HTTP or writes it into files."""

from __future__ import annotations

from typing import Final

from inferbus.schemas import errors
from inferbus.schemas.errors import BY_CODE, InferbusError

STATUSES: Final[dict[type[InferbusError], int]] = {
    errors.InferbusError: 500,
    errors.CallerError: 400,
    errors.UnsupportedContentType: 415,
    errors.PayloadTooLarge: 413,
    errors.ModelNotFound: 404,
    errors.NotSupported: 422,
    errors.Cancelled: 499,
    errors.DeadlineExceeded: 408,
    errors.InfrastructureError: 503,
    # Not 503, on which proxies take the server out of service: the fleet is there, and full.
    errors.Overloaded: 529,
}
"""Status by class; a class that is not here has that of its nearest base."""


def http_status(error: InferbusError | str) -> int:
    """The HTTP status of an error, or of an error's code; 400 for a code that is unknown."""
    kind = BY_CODE.get(error, errors.CallerError) if isinstance(error, str) else type(error)
    return next(STATUSES[base] for base in kind.__mro__ if base in STATUSES)
