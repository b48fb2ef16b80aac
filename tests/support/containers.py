"""NATS in a container, for tests of what containers bring: our configuration file, another server version.

Most tests take the server that `workers/stack` starts; with INFERBUS_TEST_NATS_IMAGE a whole suite can run
against an image instead. `tests/deploy/bring_up_docker.sh` brings a daemon up where there is none.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import importlib.util
import os
import warnings
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
NATS_CONFIG = ROOT / "deploy" / "nats" / "nats.conf"
IMAGE = "INFERBUS_TEST_NATS_IMAGE"
DEFAULT_NATS_IMAGE = "nats:2.15"
LOOPBACK = "127.0.0.1"
START_SECONDS = 30.0


def nats_image() -> str:
    """The image that tests start."""
    return os.environ.get(IMAGE) or DEFAULT_NATS_IMAGE


@functools.cache
def docker_missing() -> str | None:
    """Why no container can be started here, or None where one can."""
    if not importlib.util.find_spec("testcontainers"):
        return "testcontainers is not installed"
    import docker

    reason = None
    with warnings.catch_warnings():
        # The SDK leaves its socket to the garbage collector where nobody answers.
        warnings.simplefilter("ignore", ResourceWarning)
        try:
            with contextlib.closing(docker.from_env(timeout=5)) as client:
                client.ping()
        except docker.errors.DockerException as error:
            reason = f"no Docker daemon answers ({error})"
        gc.collect()
    return reason


def docker_available() -> bool:
    """Whether containers can be started here."""
    return docker_missing() is None


@functools.cache
def image_missing(image: str) -> str | None:
    """Why a container of this image cannot be started here, or None where one can."""
    if reason := docker_missing():
        return reason
    import docker

    with contextlib.closing(docker.from_env(timeout=60)) as client:
        try:
            client.images.get(image)
        except docker.errors.ImageNotFound:
            try:
                client.images.pull(image)
            except docker.errors.APIError as error:
                return f"{image} is not on this machine and cannot be pulled ({error.explanation})"
    return None


@contextlib.asynccontextmanager
async def nats_container(*, config: Path = NATS_CONFIG, image: str | None = None) -> AsyncIterator[str]:
    """Run a NATS server in a container of its own; gives its URL. The container goes when the context ends.

    Args:
        config: the server's configuration file.
        image: another image than that of the environment.
    """
    from testcontainers.core.config import testcontainers_config
    from testcontainers.core.container import DockerContainer

    # The reaper is one more image to pull; the context manager removes what it started.
    testcontainers_config.ryuk_disabled = True
    container = DockerContainer(
        image or nats_image(),
        command="--config /etc/nats/nats.conf",
        volumes=[(str(config), "/etc/nats/nats.conf", "ro")],
    )
    # Testcontainers' own way of exposing a port would publish it on every interface.
    ports: dict[str, Any] = container.ports
    ports["4222/tcp"] = (LOOPBACK, None)
    try:
        await asyncio.to_thread(container.start)
        address = LOOPBACK, int(await asyncio.to_thread(container.get_exposed_port, 4222))
        try:
            await _greeted(*address)
        except TimeoutError:
            out, err = await asyncio.to_thread(container.get_logs)
            raise RuntimeError(f"the server did not answer; it said: {(out + err).decode()}") from None
        yield f"nats://{address[0]}:{address[1]}"
    finally:
        await asyncio.shield(asyncio.to_thread(_remove, container))


async def _greeted(host: str, port: int) -> None:
    """Wait until the server greets: Docker accepts connections to a published port before it is up."""
    async with asyncio.timeout(START_SECONDS):
        while True:
            with contextlib.suppress(OSError):
                reader, writer = await asyncio.open_connection(host, port)
                try:
                    if (await reader.readline()).startswith(b"INFO "):
                        return
                finally:
                    writer.close()
                    with contextlib.suppress(OSError):
                        await writer.wait_closed()
            await asyncio.sleep(0.05)


def _remove(container: Any) -> None:
    try:
        container.stop()
    finally:
        container.get_docker_client().client.close()
