"""Batch files, and what has become of them."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any


def line(number: int, *, prompt: int | None = None, model: str = "scripted", **more: Any) -> dict[str, Any]:
    """A line that asks for tokens."""
    body = {"model": model, "token_ids": [number if prompt is None else prompt], "max_tokens": 2, **more}
    return {"custom_id": f"line-{number}", "method": "POST", "url": "/v1/tokens", "body": body}


def write(path: Path, lines: Iterable[dict[str, Any] | str]) -> Path:
    """A batch file."""
    texts = (each if isinstance(each, str) else json.dumps(each) for each in lines)
    path.write_text("".join(f"{text}\n" for text in texts))
    return path


def read(path: Path) -> list[dict[str, Any]]:
    """The lines of an output or error file; none where it is not there."""
    return [json.loads(text) for text in path.read_text().splitlines()] if path.exists() else []


def reconcile(output: Path, errors: Path, expected: Iterable[str]) -> None:
    """Every line of the input is in exactly one of the two files, once."""
    ids = [each["custom_id"] for each in read(output) + read(errors)]
    assert len(ids) == len(set(ids))
    assert set(ids) == set(expected)
