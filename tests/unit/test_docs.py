"""The documentation says what the code does, where that can be checked."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from inferbus.schemas import errors
from inferbus.schemas.fleet import Load
from inferbus.schemas.handoff import Transfer
from inferbus.workers.config import Option, options
from inferbus.workers.engine.scripted import ScriptedEngine
from inferbus.workers.observe.metrics import Metrics
from tests.engine.parity.wanted import WANTED

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.glob("*.md"))]
CELL = 200
"""Characters after which a table cell is a paragraph."""


@pytest.mark.parametrize("option", options(), ids=lambda option: option.flag)
def test_every_setting_is_documented_with_its_flag_variable_and_meaning(option: Option) -> None:
    text = (DOCS / "configuration.md").read_text()
    assert f"| `{option.flag}` | `{option.env}` |" in text
    assert f"| {option.help} |" in text


def test_the_differences_to_sglangs_server_are_documented_and_no_others() -> None:
    rows = re.findall(r"^\| .* \|$", (DOCS / "openai.md").read_text(), re.MULTILINE)
    assert rows[1:] == [wanted.row for wanted in WANTED]


def test_no_setting_is_documented_that_is_gone() -> None:
    rows = [line for line in (DOCS / "configuration.md").read_text().splitlines() if line.startswith("| `--")]
    assert len(rows) == len(options())


def test_every_metric_is_documented_with_its_labels_and_none_that_is_gone() -> None:
    text = (DOCS / "operating.md").read_text()
    rows = [line.split("|")[1:3] for line in text.splitlines() if line.startswith("| `inferbus_")]
    documented = {
        name: set(re.findall(r"`(\w+)`", labels))
        for names, labels in rows
        for name in re.findall(r"`(\w+)`", names)
    }
    metrics = everything_counted()
    own = {
        family.name + "_total" * (family.type == "counter"): set(family.samples[0].labels)
        - {"role", "model", "le"}
        for family in metrics.registry.collect()
        if family.name.startswith("inferbus_")
    }
    assert documented == own
    assert set(re.findall(r"inferbus_\w+?(?=_bucket|_sum|\b)", text)) == set(own)


def everything_counted() -> Metrics:
    """Metrics with at least one sample of each."""
    metrics = Metrics("both", ScriptedEngine().info)
    bus: Any = SimpleNamespace(connected=True, reconnects=0, writer=SimpleNamespace(sent=0, dropped=0))
    clock: Any = SimpleNamespace(skew=0.0)
    metrics.watch(lambda: Load(slots=1), bus, clock)
    metrics.room = {"INFER_RESULTS": (1, 2)}
    attempt: Any = SimpleNamespace(kind="chat", job_class="batch", durable=True, number=2)
    outcome: Any = SimpleNamespace(
        attempt=attempt, status="ok", code=None, first_chunk=0.1, chunks=1, queued=1, admitted_after=0
    )
    metrics.attempt_ended(outcome, 0.2)
    metrics.settled(attempt, "finished", None)
    metrics.handed_off(0.1, None, Transfer(seconds=0.1, bytes=1))
    return metrics


def test_every_error_code_is_in_the_contract() -> None:
    text = (DOCS / "contract.md").read_text()
    leaves = {
        kind.code
        for kind in errors.BY_CODE.values()
        if kind.__module__ == "inferbus.schemas.errors"
        and not any(child.__module__ == "inferbus.schemas.errors" for child in kind.__subclasses__())
    }
    assert {code for code in leaves if f"`{code}`" not in text} == set()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_no_table_cell_is_a_paragraph(page: Path) -> None:
    rows = [line for line in page.read_text().splitlines() if line.startswith("|")]
    cells = [cell.strip() for row in rows for cell in re.split(r"(?<!\\)\|", row)]
    assert [cell for cell in cells if len(cell) > CELL] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_between_pages_leads_to_a_file_and_a_heading(page: Path) -> None:
    for target in re.findall(r"\]\((?!https?:)([^)]+)\)", page.read_text()):
        name, _, anchor = target.partition("#")
        path = page.parent / name if name else page
        assert path.exists(), target
        if anchor:
            headings = re.findall(r"^#+ (.+)$", path.read_text(), re.MULTILINE)
            assert anchor in {heading.lower().replace(" ", "-") for heading in headings}, target


def test_every_test_that_the_documentation_names_is_there() -> None:
    named = set(re.findall(r"`(test_\w+)`", (DOCS / "delivery.md").read_text()))
    there = {
        name
        for path in (ROOT / "tests").rglob("test_*.py")
        for name in re.findall(r"^(?:async )?def (test_\w+)", path.read_text(), re.MULTILINE)
    }
    assert named
    assert named <= there, named - there
