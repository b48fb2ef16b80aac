"""The Kubernetes pod that a worker runs in: its deletion cost is the number of busy slots.

A Deployment that is scaled down deletes the pods with the lowest cost first, so the least busy worker goes
(https://kubernetes.io/docs/concepts/workloads/controllers/replicaset/#pod-deletion-cost). The worker writes
the annotation itself, with its service account: no sidecar, and no controller that may change every pod.
"""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import os
import ssl
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Final

import structlog

log = structlog.get_logger()

ANNOTATION: Final = "controller.kubernetes.io/pod-deletion-cost"
ACCOUNT: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount")
INTERVAL: Final = 15.0
"""Seconds between looks at the slots, as often as a HorizontalPodAutoscaler decides; the API server is asked
only after a change."""
TIMEOUT: Final = 10.0


@contextlib.asynccontextmanager
async def marked(name: str | None, busy: Callable[[], int]) -> AsyncIterator[None]:
    """Keeps a pod's deletion cost at `busy()` while the block runs; does nothing where the name is None."""
    if name is None:
        yield
        return
    following = asyncio.create_task(Pod(name).follow(busy))
    try:
        yield
    finally:
        following.cancel()


class Pod:
    """One pod, as the API server knows it.

    Args:
        name: Of the pod.
        account: The folder with the service account's token, namespace and CA certificate. The token is read
            anew each time, since it expires.
        env: Has the API server's address, as Kubernetes sets it in every container.
    """

    def __init__(self, name: str, *, account: Path = ACCOUNT, env: Mapping[str, str] = os.environ) -> None:
        self._name = name
        self._account = account
        self._env = env

    async def follow(self, busy: Callable[[], int], *, interval: float = INTERVAL) -> None:
        """Keeps the deletion cost at `busy()`, until cancelled.

        A failure is logged once, and tried again.

        Args:
            busy: The slots in use.
            interval: Seconds.
        """
        written: int | None = None
        told: str | None = None
        while True:
            cost = busy()
            if cost != written:
                try:
                    await asyncio.to_thread(self.write, cost)
                    written, told = cost, None
                except (OSError, http.client.HTTPException, KeyError, ValueError) as error:
                    reason = f"{type(error).__name__}: {error}"
                    if reason != told:
                        log.warning("pod.cost_not_written", pod=self._name, reason=reason)
                    told = reason
            await asyncio.sleep(interval)

    def write(self, cost: int) -> None:
        """Writes the annotation; blocks.

        Raises:
            OSError: No service account, or the API server does not answer or refuses.
            HTTPException: What answers speaks no HTTP.
            KeyError: Not in Kubernetes: its variables are not set.
            ValueError: They are no address.
        """
        namespace = (self._account / "namespace").read_text().strip()
        connection = http.client.HTTPSConnection(
            self._env["KUBERNETES_SERVICE_HOST"],
            int(self._env["KUBERNETES_SERVICE_PORT"]),
            timeout=TIMEOUT,
            context=ssl.create_default_context(cafile=str(self._account / "ca.crt")),
        )
        try:
            connection.request(
                "PATCH",
                f"/api/v1/namespaces/{namespace}/pods/{self._name}",
                body=json.dumps({"metadata": {"annotations": {ANNOTATION: str(cost)}}}),
                headers={
                    "Authorization": f"Bearer {(self._account / 'token').read_text().strip()}",
                    "Content-Type": "application/merge-patch+json",
                },
            )
            answer = connection.getresponse()
            if answer.status != http.client.OK:
                raise OSError(f"the API server answers {answer.status} {answer.reason}")
        finally:
            connection.close()
