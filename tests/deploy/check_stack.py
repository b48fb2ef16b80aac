"""Run compose.yaml for real on this machine: up, a question, two decode workers, a drain, down.

    python -m tests.deploy.check_stack [--build]

Needs Docker (`tests/deploy/bring_up_docker.sh`) and some 9 GB of disk; takes a few minutes on two cores.
Says what it does and how long that took, and exits with 0 if all of it worked. Nothing is left but the image.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nats
from nats.aio.client import Client as Connection

from inferbus.workers.client import Client

ROOT = Path(__file__).parents[2]
PROJECT = "inferbus-check"
PORT = 14222
MODEL = "smollm2-135m-instruct"
SUBJECT = f"infer.request.{MODEL}.chat"
BODY = {
    "messages": [{"role": "user", "content": "What is the capital of France?"}],
    "temperature": 0,
    "max_tokens": 32,
}
READY_SECONDS = 1800.0
ANSWER_SECONDS = 180.0


def compose(*arguments: str) -> str:
    """Run a compose command on the stack of this check; its output. Fails with what it said."""
    program = ["docker-compose"] if shutil.which("docker-compose") else ["docker", "compose"]
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith(("MODEL", "INFERBUS_"))},
        "NATS_PORT": str(PORT),
        "NATS_MONITOR_PORT": str(PORT + 4000),
        # Three engines have to fit into a laptop's memory, and answer on a busy one.
        "PREFILL_ARGS": "--max-total-tokens 4096",
        "DECODE_ARGS": "--max-total-tokens 4096 --prefill-timeout 120",
    }
    if "DOCKER_BUILDKIT" not in environment and not _has_buildkit():
        environment["DOCKER_BUILDKIT"] = "0"
    done = subprocess.run(
        [*program, "--project-name", PROJECT, "--project-directory", str(ROOT), *arguments],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"compose {' '.join(arguments)} failed:\n{done.stdout}{done.stderr}")
    return done.stdout


def _has_buildkit() -> bool:
    command = ["docker", "buildx", "version"]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


@contextlib.contextmanager
def step(what: str) -> Iterator[None]:
    """Say what is done, and afterwards how long it took."""
    started = time.monotonic()
    yield
    sys.stdout.write(f"{time.monotonic() - started:7.1f} s  {what}\n")
    sys.stdout.flush()


async def ready(client: Client, **wanted: int) -> None:
    """Wait until there are as many ready workers of each role."""
    async with asyncio.timeout(READY_SECONDS):
        while True:
            found = Counter[str](info.role for info in await client.workers() if info.state == "ready")
            if all(found[role] == count for role, count in wanted.items()):
                return
            await asyncio.sleep(1)


async def ask(connection: Connection) -> tuple[str, str, str]:
    """The question over plain NATS; the answer, and the two workers that gave it."""
    inbox = connection.new_inbox()
    replies = await connection.subscribe(inbox)
    body = {**BODY, "stream": True}
    await connection.publish(SUBJECT, json.dumps(body).encode(), reply=inbox)
    text = ""
    while (message := await replies.next_msg(timeout=ANSWER_SECONDS)).data:
        chunk: dict[str, Any] = json.loads(message.data)
        if "error" in chunk:
            raise SystemExit(f"an error came back: {chunk}")
        text += "".join(choice["delta"].get("content") or "" for choice in chunk["choices"])
    await replies.unsubscribe()
    headers = message.headers or {}
    return text, headers["Infer-Worker"], headers["Infer-Prefill-Worker"]


async def talk() -> None:
    """What is asked of a stack that is up."""
    url = f"nats://127.0.0.1:{PORT}"
    async with Client.connect(url) as client, contextlib.AsyncExitStack() as stack:
        connection = await nats.connect(url)
        stack.push_async_callback(connection.close)
        with step("prefill and decode are ready"):
            await ready(client, prefill=1, decode=1)
        with step("plain NATS request"):
            reply = await connection.request(SUBJECT, json.dumps(BODY).encode(), timeout=ANSWER_SECONDS)
            _check(json.loads(reply.data)["choices"][0]["message"]["content"])
        with step("streamed answer"):
            _check((await ask(connection))[0])
        with step("scaled to two decode workers"):
            compose("up", "--detach", "--scale", "decode=2")
            await ready(client, prefill=1, decode=2)
        with step("answers from both of them"):
            served: set[str] = set()
            for _ in range(16):
                text, decode, _prefill = await ask(connection)
                _check(text)
                served.add(decode)
                if len(served) == 2:
                    break
            else:
                raise SystemExit(f"only {served} answered")


def _check(answer: str) -> None:
    if "Paris" not in answer:
        raise SystemExit(f"not the answer about Paris: {answer!r}")


def exit_codes() -> dict[str, str]:
    """How the containers of the workers ended."""
    ids = compose("ps", "--all", "--quiet", "prefill", "decode").split()
    shown = subprocess.run(
        ["docker", "inspect", "--format", "{{.Name}} {{.State.ExitCode}}", *ids],
        capture_output=True,
        text=True,
        check=True,
    )
    return dict(line.split() for line in shown.stdout.splitlines())


def main() -> None:
    """Run the check."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--build", action="store_true", help="build the image first, although there is one")
    options = parser.parse_args()
    try:
        if options.build:
            with step("image built"):
                compose("build", "models")
        with step("containers started, demo model prepared"):
            compose("up", "--detach")
        asyncio.run(talk())
        with step("workers drained and stopped"):
            compose("stop", "prefill", "decode")
        codes = exit_codes()
        if set(codes.values()) != {"0"} or len(codes) != 3:
            raise SystemExit(f"the workers did not all end with 0: {codes}")
    except BaseException:
        sys.stdout.write(compose("logs", "--no-color", "--tail", "40"))
        raise
    finally:
        with step("down"):
            compose("down", "--volumes")


if __name__ == "__main__":
    main()
