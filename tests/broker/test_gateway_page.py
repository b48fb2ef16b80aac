"""The gateway's page in a real browser."""

from __future__ import annotations

from pathlib import Path

import pytest

from inferbus.workers.stack.server import NatsServer
from tests.support.browser import PROGRAM, browser
from tests.support.fleet import fleet
from tests.support.gateway import gateway

SCRIPT = """
tokenizer = true
[[rules]]
text = "<b>Paris</b>."
"""


@pytest.mark.skipif(PROGRAM is None, reason="needs chromium")
async def test_the_page_shows_the_fleet_and_answers_a_question(server: NatsServer, tmp_path: Path) -> None:
    async with fleet(server, tmp_path) as workers, gateway(server.url) as url:
        await workers.start("both", SCRIPT)
        async with browser(f"{url}/", tmp_path / "profile") as page:
            await page.until("document.getElementById('workers').innerText.includes('w1')")
            assert await page.evaluate("document.getElementById('models').innerText.includes('scripted')")
            assert "interactive" in await page.evaluate("document.getElementById('queues').innerText")
            assert f"curl {url}/v1/chat/completions" in await page.evaluate(
                "document.getElementById('example').innerText"
            )
            await page.evaluate("document.getElementById('ask').click()")
            # What a model says is text, whatever it says.
            await page.until("document.getElementById('answer').innerText === '<b>Paris</b>.'")
            assert await page.evaluate("document.getElementById('error').innerText") == ""
            assert page.problems == []


@pytest.mark.skipif(PROGRAM is None, reason="needs chromium")
async def test_the_page_asks_for_a_key_where_one_is_needed(server: NatsServer, tmp_path: Path) -> None:
    key = "sk-0123456789abcdef"
    async with (
        gateway(server.url, keys={key: "acme"}) as url,
        browser(f"{url}/", tmp_path / "profile") as page,
    ):
        await page.until("document.getElementById('error').innerText.includes('API key')")
        await page.evaluate(
            f"""(() => {{
                const box = document.getElementById('key');
                box.value = '{key}';
                box.dispatchEvent(new Event('change'));
            }})()"""
        )
        await page.until("document.getElementById('error').innerText === ''")
