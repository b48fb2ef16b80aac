"""Loading SGLang, which is thousands of modules in every process of an engine."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def loading() -> Iterator[None]:
    """Pauses the garbage collector: nothing of what is loaded becomes garbage.

    Millions of objects come up, and the collector looks at those that are there already again and again: a
    fifth of the processor time that the imports take.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
