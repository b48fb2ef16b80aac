"""Why an engine did not start."""

from __future__ import annotations

from inferbus.schemas.errors import EngineFailed


class LaunchFailed(EngineFailed):
    """The engine did not start; the message is the reason, in one line. Its cause has the traceback."""
