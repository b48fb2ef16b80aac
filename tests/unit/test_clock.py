"""The server's clock, as a worker knows it whose own is wrong."""

from __future__ import annotations

import datetime as dt
from typing import Final

import pytest
from structlog.testing import capture_logs

from inferbus.workers.bus.jetstream.clock import ServerClock

NOON: Final = dt.datetime(2026, 1, 1, 12, tzinfo=dt.UTC)


class Machine:
    """A worker's clocks, and what lies between it and its server."""

    def __init__(self, *, ahead: float) -> None:
        self.ahead = ahead
        self.passed = 1000.0
        self.trips: list[tuple[float, float]] = []
        self.clock = ServerClock(self.read, wall=self.wall, monotonic=lambda: self.passed)

    def server(self) -> dt.datetime:
        return NOON + dt.timedelta(seconds=self.passed)

    def wall(self) -> dt.datetime:
        return self.server() + dt.timedelta(seconds=self.ahead)

    async def read(self) -> dt.datetime:
        there, back = self.trips.pop(0) if self.trips else (0.01, 0.01)
        self.passed += there
        told = self.server()
        self.passed += back
        return told

    def error(self) -> float:
        return (self.clock.now() - self.server()).total_seconds()


@pytest.mark.parametrize("ahead", [75.0, -75.0, 0.0])
async def test_the_servers_time_is_known_whatever_the_workers_own_clock_says(ahead: float) -> None:
    machine = Machine(ahead=ahead)
    assert machine.error() == ahead
    await machine.clock.measure()
    machine.passed += 500.0
    machine.ahead = 3600.0  # Somebody sets the worker's clock.
    assert abs(machine.error()) < 0.001
    assert machine.clock.skew == pytest.approx(ahead)


async def test_an_answer_that_was_long_under_way_does_not_count() -> None:
    machine = Machine(ahead=75.0)
    machine.trips = [(0.0, 8.0), (0.02, 0.01), (6.0, 0.0)]
    await machine.clock.measure()
    assert abs(machine.error()) <= 0.015


async def test_a_clock_that_is_wrong_is_warned_of_once_until_it_is_right() -> None:
    machine = Machine(ahead=75.0)
    with capture_logs() as logs:
        await machine.clock.measure()
        await machine.clock.measure()
        machine.ahead = 0.5
        await machine.clock.measure()
    assert [(each["log_level"], each["event"], each["ahead"]) for each in logs] == [
        ("warning", "clock.skewed", 75.0),
        ("info", "clock.right", 0.5),
    ]
