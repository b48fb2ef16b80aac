"""What `--map`, `--set` and `--kind` say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
import pytest

from inferbus.workers.batch.template import Template
from inferbus.workers.cli.mapping import mapping_options, template_of


def described(*arguments: str) -> Template | None:
    """The template of a command line."""

    @mapping_options
    def command(**flags: Any) -> Template | None:
        found = template_of(flags)
        assert flags == {}
        return found

    found = click.command()(command).main(list(arguments), standalone_mode=False)
    assert found is None or isinstance(found, Template)
    return found


def test_fields_come_from_columns_and_constants_are_json_or_text() -> None:
    made = described(
        "--map", "prompt=question", "--map", "stop:=stops", "--map", "custom_id=q-{{id}}",
        "--set", "model=llama", "--set", "max_tokens=5", "--set", 'logit_bias={"1": 2}',
    )  # fmt: skip
    assert made == Template(
        body={
            "messages": [{"role": "user", "content": "{{question}}"}],
            "stop": "{{stops | from_json}}",
            "model": "llama",
            "max_tokens": 5,
            "logit_bias": {"1": 2},
        },
        custom_id="q-{{id}}",
    )


def test_a_body_is_given_in_a_file_or_at_once(tmp_path: Path) -> None:
    text = '{"token_ids": "{{ids | from_json}}", "model": "m"}'
    (tmp_path / "body.json").write_text(text)
    expected = Template(kind="tokens", body={"token_ids": "{{ids | from_json}}", "model": "m"})
    assert described("--kind", "tokens", "--map", f"@{tmp_path / 'body.json'}") == expected
    assert described("--kind", "tokens", "--map", text) == expected


def test_without_a_mapping_the_file_has_lines() -> None:
    assert described() is None


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--set", "model=m"], "--set and --kind need --map"),
        (["--kind", "tokens"], "--set and --kind need --map"),
        (["--map", "question"], "--map question: wants FIELD=COLUMN"),
        (["--map", "prompt="], "wants FIELD=COLUMN"),
        (["--map", "prompt=a", "--set", "model"], "--set model: wants FIELD=VALUE"),
        (["--map", "prompt=a", "--map", "prompt=b"], "prompt twice"),
        (["--map", "prompt=a", "--map", '{"prompt": "b"}'], "prompt twice"),
        (["--map", "max_tokens=n"], "the mapping has no prompt or messages"),
        (["--map", "{broken"], "--map: wants an object in JSON"),
        (["--map", "@/nowhere"], "@/nowhere: No such file"),
    ],
)
def test_what_cannot_be_read_is_a_usage_error(arguments: list[str], said: str) -> None:
    with pytest.raises(click.UsageError, match=said):
        described(*arguments)
