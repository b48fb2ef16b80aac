"""The engines that tests/engine shares, each in its own process, all started at the same time and early.

Starting them keeps two cores busy for two minutes. Tests of other folders mostly wait meanwhile, so the
engines start with the first test of a session, at the lowest priority, and are waited for when a test needs
one.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path

import pytest

from inferbus.schemas.fleet import Role
from tests.support.remote_engine import RemoteEngine
from tests.support.sglang_server import SGLangServer

FLAGS = ("--max-total-tokens", "8192", "--max-running-requests", "32", "--random-seed", "1")
ROLES: dict[str, Role] = {
    "both": "both",
    "prefill": "prefill",
    "decode": "decode",
    "bare": "both",
    "embeds": "both",
}
OWN_FLAGS = {
    # No parser is named: SGLang finds it by the template.
    "both": ("--chat-template", str(Path(__file__).with_name("calling.jinja"))),
    "bare": ("--skip-tokenizer-init",),
    # Its embeddings may be cut to these sizes.
    "embeds": (
        "--is-embedding",
        "--json-model-override-args",
        '{"is_matryoshka": true, "matryoshka_dimensions": [8, 16]}',
    ),
}

KEPT = os.environ.get("INFERBUS_TEST_ENGINES")
"""A folder: they stay for the next test run, which finds them there; for work on the tests themselves."""


def needed(items: Iterable[pytest.Item], fixture: str = "fleet") -> bool:
    """Whether one of these tests uses them, or what this fixture has."""
    return any(fixture in getattr(item, "fixturenames", ()) for item in items)


def start(folder: Path) -> dict[str, RemoteEngine]:
    """`both`, a pair of `prefill` and `decode`, `bare` (no tokenizer), `embeds`. None is waited for."""
    folder = Path(KEPT) if KEPT else folder
    return {
        name: RemoteEngine(role, folder / name, [*FLAGS, *OWN_FLAGS.get(name, ())])
        for name, role in ROLES.items()
    }


def start_server(folder: Path) -> SGLangServer:
    """SGLang's own server with the flags of `both`; the parser is named, since nothing finds it there."""
    argv = [*FLAGS, *OWN_FLAGS["both"], "--tool-call-parser", "qwen25"]
    return SGLangServer((Path(KEPT) if KEPT else folder) / "http", argv)


def stop(engines: Mapping[str, RemoteEngine | SGLangServer]) -> None:
    """Ends them, also a second time."""
    for engine in engines.values() if not KEPT else ():
        engine.stop()
