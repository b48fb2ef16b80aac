"""Grafana's dashboard and Prometheus's alert rules: every query run against real ones."""

from __future__ import annotations

import importlib.util
import json
import math
import re
import subprocess
from collections.abc import Set
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

from inferbus.schemas.errors import CODES, InferbusError
from inferbus.workers.client import Client
from inferbus.workers.stack.server import NatsServer
from tests.support.eventually import eventually
from tests.support.fleet import MODEL, fleet
from tests.support.prometheus_server import program, prometheus

DEPLOY = Path(__file__).parents[2] / "deploy"
ALERTS = DEPLOY / "prometheus" / "alerts.yml"
CASES = Path(__file__).with_name("alerts.cases.yml")
PREFILL = """
[[rules]]
user = "bad"
[rules.fault]
do = "fail"
code = "engine_failed"
[[rules]]
transfer = { seconds = 0.004, bytes = 163840 }
"""


def needed(name: str) -> Path:
    """A program of Prometheus's."""
    found = program(name)
    if found is None:
        pytest.skip(f"{name} is not on PATH, and Debian's package cannot be had")
    return found


def generator() -> ModuleType:
    """The module that writes the dashboard."""
    spec = importlib.util.spec_from_file_location("dashboard", DEPLOY / "grafana" / "dashboard.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_dashboard_is_what_its_code_builds() -> None:
    module = generator()
    assert module.FILE.read_text() == module.build()
    panels = json.loads(module.build())["panels"]
    questions = [each["title"] for each in panels if each["type"] == "row"]
    assert questions == ["Is it healthy?", "Is it fast?", "What is it waiting for?"]
    # Beside and below each other, three in a row.
    places = [(each["gridPos"]["x"], each["gridPos"]["y"]) for each in panels]
    assert len(set(places)) == len({each["id"] for each in panels}) == len(panels)


def rules() -> list[dict[str, Any]]:
    """The alert rules."""
    (group,) = yaml.safe_load(ALERTS.read_text())["groups"]
    found: list[dict[str, Any]] = group["rules"]
    return found


def checked(*arguments: str | Path) -> None:
    """Has promtool check something."""
    done = subprocess.run([needed("promtool"), *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_alert_rules_are_valid_and_name_codes_that_there_are() -> None:
    named = re.findall(r'code=~"([^"]+)"', ALERTS.read_text())
    assert {code for text in named for code in text.split("|")} <= set(CODES)
    checked("check", "rules", ALERTS)


def test_every_alert_is_raised_by_what_it_is_for_and_by_nothing_less() -> None:
    cases = yaml.safe_load(CASES.read_text())["tests"]
    raised = {
        each["alertname"] for case in cases for each in case["alert_rule_test"] if each.get("exp_alerts")
    }
    assert raised == {rule["alert"] for rule in rules()}
    checked("test", "rules", CASES)


def test_operating_says_what_to_do_about_every_alert() -> None:
    page = (DEPLOY.parent / "docs" / "operating.md").read_text()
    assert [rule["alert"] for rule in rules() if f"| `{rule['alert']}` |" not in page] == []


def observed(expression: str) -> str:
    """What an alert compares, without its threshold; it must be there to be compared."""
    return re.split(r" (?:[<>]|==) [\d.]+$| unless ", expression)[0]


async def test_every_query_of_the_dashboard_and_of_the_alerts_has_an_answer(tmp_path: Path) -> None:
    binary = needed("prometheus")
    async with (
        NatsServer(tmp_path / "nats", sync_interval=None) as server,
        fleet(server, tmp_path) as found,
        Client.connect(server.url) as client,
    ):
        workers = [await found.start(role, PREFILL, metrics_port=0) for role in ("prefill", "decode")]
        ports = [found.events(worker, "metrics.serving")[0]["port"] for worker in workers]
        async with prometheus(binary, tmp_path, ports) as scraping:

            async def answered(query: str, labels: Set[str] = frozenset()) -> bool:
                series = await scraping.series(query)
                return any(math.isfinite(value) and labels <= set(has) for has, value in series)

            # A rate sees what happens after a worker's first scrape.
            scraped = f"count(inferbus_slots) == {len(workers)}"
            await eventually(lambda: answered(scraped), within=30, what="all workers were scraped")
            for _ in range(3):
                await client.tokens(MODEL, [1, 2], max_tokens=4).answer()
                await client.result(await client.submit("tokens", MODEL, {"token_ids": [1], "max_tokens": 2}))
            with pytest.raises(InferbusError):
                await client.tokens(MODEL, [1], user="bad").answer()
            asked = {
                query.replace("$__rate_interval", "1m").replace("$model", ".*"): set(
                    re.findall(r"{{(\w+)}}", legend)
                )
                for panels in generator().PANELS.values()
                for _, _, _, queries in panels
                for legend, query in queries.items()
            }
            # What "no worker" looks at is absent as long as all is well.
            asked |= {
                observed(rule["expr"]): set() for rule in rules() if not rule["expr"].startswith("absent")
            }
            for query, labels in asked.items():
                await eventually(lambda q=query, of=labels: answered(q, of), within=30, what=query)
