"""Structured logs on standard error: one event per state change.

Events name the job, the attempt and the worker, never what a request or an
answer holds.
"""

from __future__ import annotations

import logging
import sys
from typing import Any, Final, Literal

import msgspec
import structlog

Format = Literal["auto", "json", "text"]

_TRACEBACKS: Final = structlog.tracebacks.ExceptionDictTransformer(show_locals=False)
"""Local variables hold prompts, answers and passwords; by default structlog shows them."""

_settings: dict[str, Any] | None = None


def configure(*, level: str = "INFO", format: Format = "auto", cache: bool = False, **bound: str) -> None:
    """Sets up structlog for this process.

    Args:
        level: Least severe level that is shown.
        format: `json` lines, `text` for people, or `auto`: text on a terminal.
        cache: Loggers keep this configuration for good, which makes an event cheaper.
        bound: Fields of every event (`worker`, `role`, `model`). Fields that a task binds by
            `structlog.contextvars` (`job`, `attempt`) are added to its events.
    """
    global _settings
    _settings = {"level": level, "format": format, "cache": cache, **bound}
    text = format == "text" or (format == "auto" and sys.stderr.isatty())
    rendering: list[structlog.typing.Processor] = (
        [structlog.dev.ConsoleRenderer(exception_formatter=structlog.dev.plain_traceback)]
        if text
        else [structlog.processors.ExceptionRenderer(_TRACEBACKS), _render]
    )
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            lambda logger, method, event: {**bound, **event},
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            *rendering,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelName(level.upper())),
        logger_factory=structlog.WriteLoggerFactory(sys.stderr),
        cache_logger_on_first_use=cache,
    )


def settings() -> dict[str, Any] | None:
    """The arguments of `configure` in this process, for a child process to repeat; None without a call."""
    return _settings


def default() -> None:
    """For a program that has set up no logging of its own: warnings and worse, on standard error."""
    if not structlog.is_configured():
        configure(level="WARNING")


def _render(logger: Any, method: str, event: structlog.typing.EventDict) -> str:
    return msgspec.json.encode(event, enc_hook=repr).decode()
