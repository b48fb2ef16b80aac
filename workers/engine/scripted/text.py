"""Text of a scripted engine: a tokenizer of bytes, and incremental decoding."""

from __future__ import annotations

import codecs
from collections.abc import Mapping


class ByteTokenizer:
    """Token ids below 256 are bytes of UTF-8; others stand for a word made of their number.

    Args:
        words: Tokens that stand for something else: text, or bytes.
    """

    def __init__(self, words: Mapping[int, str | list[int]] | None = None) -> None:
        self._bytes = _Bytes()
        for token, word in (words or {}).items():
            self._bytes[token] = word.encode() if isinstance(word, str) else bytes(word)
        self._texts = _Texts(self._bytes)

    def encode(self, text: str) -> list[int]:
        """A text as tokens, one a byte."""
        return list(text.encode("utf-8", "replace"))

    def decode(self, token_ids: list[int]) -> str:
        """The text of tokens; what is not UTF-8 becomes U+FFFD."""
        return b"".join(self._bytes[token] for token in token_ids).decode("utf-8", "replace")

    def stream(self) -> TextStream:
        """An incremental decoder."""
        return TextStream(self._bytes, self._texts)


class TextStream:
    """Tokens in, the text that they settle out: a character whose bytes are not all there is held back."""

    def __init__(self, pieces: _Bytes, texts: _Texts) -> None:
        self._bytes = pieces
        self._texts = texts
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._pending = False

    def push(self, token_ids: list[int], *, last: bool = False) -> str:
        """The text that these tokens settle.

        Args:
            token_ids: The next ones.
            last: Whether no more follow; what is held back then comes as U+FFFD.
        """
        if not self._pending:
            texts = self._texts
            text = texts[token_ids[0]] if len(token_ids) == 1 else _join(texts, token_ids)
            if text is not None:
                return text
        text = self._decoder.decode(b"".join(self._bytes[token] for token in token_ids), last)
        self._pending = bool(self._decoder.getstate()[0])
        return text


class _Bytes(dict[int, bytes]):
    """Token to bytes."""

    def __missing__(self, token: int) -> bytes:
        self[token] = made = bytes((token,)) if token < 256 else b" t%d" % token
        return made


class _Texts(dict[int, str | None]):
    """Token to text, where the token holds whole characters: nearly all of them, and decoded only once."""

    def __init__(self, pieces: _Bytes) -> None:
        super().__init__()
        self._bytes = pieces

    def __missing__(self, token: int) -> str | None:
        try:
            text = self._bytes[token].decode()
        except UnicodeDecodeError:
            text = None
        self[token] = text
        return text


def _join(texts: _Texts, token_ids: list[int]) -> str | None:
    parts = [texts[token] for token in token_ids]
    return None if None in parts else "".join(part for part in parts if part is not None)
