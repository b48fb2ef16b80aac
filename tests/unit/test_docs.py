"""The documentation says what the code does, where that can be checked."""

from __future__ import annotations

from pathlib import Path

import pytest

from schemas import errors
from workers.config import Option, options

DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.parametrize("option", options(), ids=lambda option: option.flag)
def test_every_setting_is_documented_with_its_flag_variable_and_meaning(option: Option) -> None:
    text = (DOCS / "configuration.md").read_text()
    assert f"| `{option.flag}` | `{option.env}` |" in text
    assert f"| {option.help} |" in text


def test_no_setting_is_documented_that_is_gone() -> None:
    rows = [line for line in (DOCS / "configuration.md").read_text().splitlines() if line.startswith("| `--")]
    assert len(rows) == len(options())


def test_every_error_code_is_in_the_contract() -> None:
    text = (DOCS / "contract.md").read_text()
    leaves = {
        kind.code
        for kind in errors.BY_CODE.values()
        if kind.__module__ == "schemas.errors"
        and not any(child.__module__ == "schemas.errors" for child in kind.__subclasses__())
    }
    assert {code for code in leaves if f"`{code}`" not in text} == set()
