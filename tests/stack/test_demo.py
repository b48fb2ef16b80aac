"""The demo, with scripted engines in place of SGLang; everything else is real."""

from __future__ import annotations

import functools
import io
import re
from pathlib import Path

import pytest
from rich.console import Console
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from inferbus.workers.stack import demo, models
from inferbus.workers.stack.errors import ModelUnavailable
from inferbus.workers.stack.local import LocalStack

SCRIPT = """
tokenizer = true

[[rules]]
text = "Paris."
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model folder that has as much as the demo itself reads of it."""
    Tokenizer(WordLevel({"?": 0, "Rome": 1}, unk_token="?")).save(str(tmp_path / "tokenizer.json"))
    monkeypatch.setattr(models, "ensure", lambda _name, report: tmp_path)
    return tmp_path


@pytest.fixture
def scripted(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = folder / "script.toml"
    script.write_text(SCRIPT)
    monkeypatch.setattr(demo, "LocalStack", functools.partial(LocalStack, scripted=script))


@pytest.mark.parametrize("terminal", [False, True], ids=["to a file", "on a terminal"])
@pytest.mark.usefixtures("scripted")
async def test_it_shows_three_answers_and_who_served_them(terminal: bool) -> None:
    out = io.StringIO()
    await demo.run(Console(file=out, force_terminal=terminal, width=200, color_system=None))
    # Without the control codes of the spinner.
    shown = re.sub(r"\x1b\[[0-9?]*[A-Za-z]", "", out.getvalue())
    for title in ("1 · a chat request", "2 · a token request", "3 · a durable job"):
        assert title in shown
    assert shown.count("assistant  Paris.") == 2
    served = re.findall(r"\d+ tokens? · .*prefill (prefill-\w+) → decode (decode-\w+) · ", shown)
    assert len(served) == 3
    assert len(set(served)) == 1
    assert "infer.request.smollm2-135m-instruct.chat" in shown
    assert "stored as job " in shown
    assert shown.rstrip().endswith("✓ everything that was started is stopped")


def test_a_missing_model_is_told_in_a_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def unavailable(_name: str, report: object) -> Path:
        raise ModelUnavailable("the demo model could not be fetched: no network")

    monkeypatch.setattr(models, "ensure", unavailable)
    assert demo.main() == 1
    assert "✗ the demo model could not be fetched: no network" in capsys.readouterr().out
