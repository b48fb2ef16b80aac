"""Structured logs on standard error: one event per state change.

Events name the job, the attempt and the worker, never what a request or an
answer holds.
"""

from __future__ import annotations

import logging
import sys
from typing import Literal

import structlog

Format = Literal["auto", "json", "text"]


def configure(*, level: str = "INFO", format: Format = "auto", **bound: str) -> None:
    """Sets up structlog for this process.

    Args:
        level: Least severe level that is shown.
        format: `json` lines, `text` for people, or `auto`: text on a terminal.
        bound: Fields of every event (`worker`, `role`, `model`).
    """
    text = format == "text" or (format == "auto" and sys.stderr.isatty())
    renderer: structlog.typing.Processor = (
        structlog.dev.ConsoleRenderer() if text else structlog.processors.JSONRenderer()
    )
    processors: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    if not text:
        processors.append(structlog.processors.dict_tracebacks)
    structlog.configure(
        processors=[*processors, renderer],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelName(level.upper())),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=False,
    )
    structlog.contextvars.clear_contextvars()
    structlog.contextvars.bind_contextvars(**bound)
