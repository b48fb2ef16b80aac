"""The versions of SGLang that this adapter was read against and tried with.

The adapter uses parts of SGLang that are not promised to anyone (request
conversion, formatters, the tokenizer manager), so a version outside the range
is refused instead of failing somewhere in the middle of a request.
"""

from __future__ import annotations

import importlib.metadata
import re
from typing import Final

from inferbus.workers.engine.sglang.errors import LaunchFailed

OLDEST: Final = (0, 5, 17)
BELOW: Final = (0, 5, 24)


def installed() -> str:
    """The version of the installed SGLang, which is in the supported range.

    Raises:
        LaunchFailed: SGLang is not installed, or another version is.
    """
    try:
        version = importlib.metadata.version("sglang")
    except importlib.metadata.PackageNotFoundError:
        raise LaunchFailed("SGLang is not installed: pip install 'inferbus[gpu]'") from None
    found = re.match(r"(\d+)\.(\d+)\.(\d+)", version)
    if found is None or not OLDEST <= tuple(map(int, found.groups())) < BELOW:
        supported = f"{_dotted(OLDEST)} <= version < {_dotted(BELOW)}"
        raise LaunchFailed(f"SGLang {version} is installed; supported is {supported}")
    return version


def _dotted(parts: tuple[int, ...]) -> str:
    return ".".join(map(str, parts))
