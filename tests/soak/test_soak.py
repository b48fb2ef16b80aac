"""The soak as a part of the suite, for `SOAK_SECONDS`, a minute by default; see docs/delivery.md."""

from __future__ import annotations

import os

import pytest
from rich.console import Console

from inferbus.workers.observe import logs
from tests.soak.soak import READING, SETTLING, STARTING, Settings, Soak

SETTINGS = Settings.of({"SOAK_SECONDS": "60"} | dict(os.environ))

pytestmark = pytest.mark.faults


@pytest.mark.timeout(STARTING + SETTINGS.seconds + 2 * SETTLING + READING + 60)
async def test_nothing_is_lost_and_nothing_doubled_whatever_happens_to_workers_and_server() -> None:
    logs.configure(level="CRITICAL")
    assert not await Soak(SETTINGS, Console(width=160)).run()
