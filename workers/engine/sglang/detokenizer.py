"""A repair of SGLang's detokenizer: text that was sent is never sent again.

SGLang decodes a request's tokens as they come. Where they end inside of a
character, it sends the part of the new text that looks settled, notes how much of
the text was sent, and decodes the same tokens again with the next ones. Which part
that is depends on the last characters, so with several tokens at once it can be
shorter the second time. The note then goes back, and text is sent twice
(sgl-project/sglang#31598; in 0.5.17 as in 0.5.23). Here the note only grows, since
a settled part stays the beginning of what is decoded later.
"""

from __future__ import annotations

from typing import Any


def install() -> None:
    """Repairs the detokenizer of this process; to be called before it runs."""
    from sglang.srt.managers import detokenizer_manager

    detokenizer_manager.DecodeStatus = _growing(detokenizer_manager.DecodeStatus)


def _growing(status: Any) -> Any:
    class Growing(status):  # type: ignore[misc]
        """The state of one request's text."""

        _sent = 0

        @property
        def sent_offset(self) -> int:
            """Characters sent so far."""
            return self._sent

        @sent_offset.setter
        def sent_offset(self, value: int) -> None:
            self._sent = max(self._sent, value)

    return Growing
