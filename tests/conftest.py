"""What holds for every test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import structlog


@pytest.fixture(autouse=True)
def logging_of_its_own() -> Iterator[None]:
    """Commands configure logging for their process; the next test must not inherit that."""
    yield
    structlog.reset_defaults()
