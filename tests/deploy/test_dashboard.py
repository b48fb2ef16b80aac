"""Grafana's dashboard and Prometheus's alert rules: every query run against real ones."""

from __future__ import annotations

import importlib.util
import json
import math
import re
import subprocess
from pathlib import Path
from types import ModuleType

import pytest

from inferbus.schemas.errors import CODES
from inferbus.workers.client import Client
from inferbus.workers.stack.server import NatsServer
from tests.support.eventually import eventually
from tests.support.fleet import MODEL, fleet
from tests.support.prometheus_server import program, prometheus

DEPLOY = Path(__file__).parents[2] / "deploy"
ALERTS = DEPLOY / "prometheus" / "alerts.yml"
PREFILL = "[[rules]]\ntransfer = { seconds = 0.004, bytes = 163840 }"


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
    assert len(set(places)) == len(places)


def test_the_alert_rules_are_valid_and_name_codes_that_there_are() -> None:
    named = re.findall(r'code=~"([^"]+)"', ALERTS.read_text())
    assert {code for text in named for code in text.split("|")} <= set(CODES)
    done = subprocess.run([needed("promtool"), "check", "rules", ALERTS], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


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

            async def answered(query: str) -> bool:
                return any(map(math.isfinite, await scraping.query(query)))

            await eventually(lambda: answered("inferbus_slots"), what="workers were scraped")
            for _ in range(3):
                await client.tokens(MODEL, [1, 2], max_tokens=4).answer()
                await client.result(await client.submit("tokens", MODEL, {"token_ids": [1], "max_tokens": 2}))
            for panels in generator().PANELS.values():
                for title, _, _, queries in panels:
                    for query in queries.values():
                        asked = query.replace("$__rate_interval", "1m").replace("$model", ".*")
                        await eventually(lambda asked=asked: answered(asked), what=f"{title}: {asked}")
            for expression in re.findall(r"expr: (?:>-\n)?((?:.+\n)+?) +(?:for|labels):", ALERTS.read_text()):
                # Without its threshold; what an alert looks for must be there to be compared.
                looked_at = re.split(r" (?:[<>]|==) [\d.]+$| unless ", " ".join(expression.split()))[0]
                if not looked_at.startswith("absent"):
                    await eventually(lambda asked=looked_at: answered(asked), what=looked_at)
