"""What an engine does while it loads."""

from __future__ import annotations

import contextlib
from pathlib import Path


class Progress:
    """What an engine does while it loads, in a few words; may be read from another thread.

    The words come from this process, or from a file to which the engine's other processes write.
    """

    def __init__(self) -> None:
        self._said = "starting"
        self._file: Path | None = None

    def say(self, text: str) -> None:
        """This process does something else now."""
        self._said = text

    def follow(self, file: Path | None) -> None:
        """What a file says counts as long as it is there; None: no file any more."""
        self._file = file

    @property
    def text(self) -> str:
        """What the engine does now."""
        file = self._file
        if file is not None:
            with contextlib.suppress(OSError):
                return file.read_text() or self._said
        return self._said
