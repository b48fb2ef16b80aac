"""Engines: the interface, SGLang behind it, and a scripted one."""

from __future__ import annotations

from typing import Final

SGLANG_PYTHONS: Final = ((3, 11), (3, 12))
"""Python versions that SGLang and its packages are released for."""
