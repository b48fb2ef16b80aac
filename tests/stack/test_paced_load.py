"""The benchmarks' paced load accounts for every request, also for those that get no answer."""

from __future__ import annotations

import asyncio
from pathlib import Path

from benchmarks.load import NO_RESPONDERS, SILENT, Sent, Wire, encode
from inferbus.schemas.subjects import Subjects
from inferbus.workers.client import Client
from inferbus.workers.stack.local import LocalStack
from tests.support.eventually import eventually

SLOW = "[[rules]]\nlength = 1000\ndelay = 0.02\n"
BODY = encode({"token_ids": [1, 2], "max_tokens": 3})
ENDLESS = encode({"token_ids": [1, 2], "max_tokens": 1000})


async def _busy(client: Client) -> bool:
    return any(each.load.busy for each in await client.workers())


async def test_requests_are_told_apart_by_what_became_of_them(tmp_path: Path) -> None:
    script = tmp_path / "script.toml"
    script.write_text(SLOW)

    async with LocalStack("", model="toy", roles=["both"], scripted=script, directory=tmp_path) as stack:

        async def paced(bodies: list[bytes], due: list[float], silence: float = 30.0) -> list[Sent]:
            with Wire(stack.url) as wire:
                subject = Subjects().request("toy", "tokens")
                return await asyncio.to_thread(wire.paced, subject, bodies, due, silence=silence)

        answered = await paced([BODY] * 3, [0.0, 0.0, 0.1])
        assert [(each.fate, len(each.moments)) for each in answered] == [("ok", 3)] * 3
        assert all(each.sent >= each.due for each in answered)

        endless = asyncio.create_task(paced([ENDLESS], [0.0], silence=1.0))
        async with Client.connect(stack.url) as client:
            await eventually(lambda: _busy(client), within=15, what="request taken")
        next(iter(stack.workers.values())).kill()
        assert [each.fate for each in await endless] == [SILENT]
        assert [each.fate for each in await paced([BODY], [0.0])] == [NO_RESPONDERS]

        await stack.add("both")
        assert [each.fate for each in await paced([BODY], [0.0])] == ["ok"]
