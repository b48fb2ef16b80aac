"""Pauses a decode worker's queue while no prefill worker is there.

An engine takes a minute to load. Jobs that were pulled while the only prefill
worker restarts would fail again and again, and be dead before it is back. Live
requests cannot wait, and get an error at once.
"""

from __future__ import annotations

import asyncio

import structlog

from inferbus.workers.bus.fleet.registry import Registry
from inferbus.workers.bus.queue.job_queue import JobQueue
from inferbus.workers.pairing.picker import Picker

log = structlog.get_logger()


class PrefillGate:
    """Pauses and resumes one worker's queue.

    Args:
        queue: Where its jobs come from.
        registry: Announces changes.
        picker: Knows whether there is a prefill worker that fits.
    """

    def __init__(self, queue: JobQueue, registry: Registry, picker: Picker) -> None:
        self._queue = queue
        self._picker = picker
        self._paused = False
        self._changed = asyncio.Event()
        registry.on_change(self._changed.set)

    async def update(self) -> None:
        """Pauses or resumes, as the workers that are there now require."""
        reason = self._picker.unavailable_reason
        if reason is not None and not self._paused:
            self._paused = True
            log.warning("jobs.waiting_for_prefill", reason=reason)
            await self._queue.pause()
        elif reason is None and self._paused:
            self._paused = False
            log.info("jobs.resumed")
            self._queue.resume()

    async def run(self) -> None:
        """Follows every change, until it is cancelled."""
        while True:
            self._changed.clear()
            await self.update()
            await self._changed.wait()
