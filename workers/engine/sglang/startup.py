"""Start-up of SGLang: the supported versions, its import, and the error of an engine that did not start.

The adapter uses parts of SGLang that are not public (request conversion,
formatters, the tokenizer manager), so a version outside the tested range is
refused at the start instead of failing in the middle of a request.
"""

from __future__ import annotations

import contextlib
import gc
import importlib.metadata
import re
from collections.abc import Iterator
from typing import Final

from inferbus.schemas.errors import EngineFailed

OLDEST: Final = (0, 5, 17)
BELOW: Final = (0, 5, 24)


class LaunchFailed(EngineFailed):
    """The engine did not start; the message is the reason, in one line. Its cause has the traceback."""


def installed_version() -> str:
    """The version of the installed SGLang, which is in the supported range.

    Raises:
        LaunchFailed: SGLang is not installed, or another version is.
    """
    try:
        version = importlib.metadata.version("sglang")
    except importlib.metadata.PackageNotFoundError:
        raise LaunchFailed("SGLang is not installed: pip install 'inferbus[gpu]'") from None
    match = re.match(r"(\d+)\.(\d+)\.(\d+)", version)
    if match is None or not OLDEST <= tuple(map(int, match.groups())) < BELOW:
        supported = f"{_dotted(OLDEST)} <= version < {_dotted(BELOW)}"
        raise LaunchFailed(f"SGLang {version} is installed; supported is {supported}")
    return version


@contextlib.contextmanager
def collector_paused() -> Iterator[None]:
    """Pauses the garbage collector while SGLang is imported: nothing of what is imported becomes garbage.

    The import creates millions of objects in every process of an engine, and the collector would traverse
    the ones that are there again and again: a fifth of the processor time of the import.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _dotted(parts: tuple[int, ...]) -> str:
    return ".".join(map(str, parts))
