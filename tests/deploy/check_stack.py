"""Run compose.yaml for real on this machine, as `make test-containers` does.

    python -m tests.deploy.check_stack [--build]

Builds the images, starts the stack, asks over plain NATS and with OpenAI's client from outside (a stream,
and a batch of a file), and with the client's image from inside. Scales decode to two, kills one of them in
the middle of an answer, stops one in the middle of another answer, and stops the rest. Needs Docker
(`tests/deploy/bring_up_docker.sh`) and some 9 GB of disk.
Says what it does and how long that took, and exits with 0 if all of it worked. Nothing is left but the
images.
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
from typing import Any, Final

import nats
import openai
from nats.aio.client import Client as Connection

from inferbus.workers.client import Client, text

ROOT = Path(__file__).parents[2]
PROJECT = "inferbus-check"
PORT = 14222
GATEWAY_PORT = 18000
MODEL = "smollm2-135m-instruct"
SUBJECT = f"infer.request.{MODEL}.chat"
QUESTION = "What is the capital of France?"
BODY = {
    "messages": [{"role": "user", "content": QUESTION}],
    "temperature": 0,
    "max_tokens": 32,
}
LONG = {
    "messages": [{"role": "user", "content": "Count from one to one thousand."}],
    "temperature": 0,
    "max_tokens": 192,
    "ignore_eos": True,
}
BEGUN = 8
"""Chunks of a long answer after which its worker is killed or stopped."""
CHAT = ["inferbus", "chat", "--temperature", "0", MODEL, QUESTION]
ENDPOINT: Final = "/v1/chat/completions"
LINES = 6
"""Lines of the batch."""
BUILD_SECONDS = 1800.0
COMPOSE_SECONDS = 900.0
DOCKER_SECONDS = 180.0
READY_SECONDS = 600.0
ANSWER_SECONDS = 180.0
KILLED = 137


def compose(*arguments: str) -> str:
    """Run a compose command on the stack of this check; its output. Fails with what it said."""
    program = ["docker-compose"] if shutil.which("docker-compose") else ["docker", "compose"]
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith(("MODEL", "INFERBUS_"))},
        "NATS_PORT": str(PORT),
        "GATEWAY_PORT": str(GATEWAY_PORT),
        "GATEWAY_KEYS": "",
        "NATS_MONITOR_PORT": str(PORT + 4000),
        # Three engines have to fit into a laptop's memory, and answer on a busy one.
        "PREFILL_ARGS": "--max-total-tokens 4096",
        "DECODE_ARGS": "--max-total-tokens 4096 --prefill-timeout 120",
    }
    done = subprocess.run(
        [*program, "--project-name", PROJECT, "--project-directory", str(ROOT), *arguments],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=COMPOSE_SECONDS,
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"compose {' '.join(arguments)} failed:\n{done.stdout}{done.stderr}")
    return done.stdout


def build(target: str) -> None:
    """Builds an image as compose.yaml does, over the host's network: a container's may reach no registry."""
    command = ["docker", "build", "--network", "host", "--target", target, "--tag", f"inferbus:{target}"]
    with_buildkit = subprocess.run(["docker", "buildx", "version"], capture_output=True, check=False)
    environment = {"DOCKER_BUILDKIT": "0" if with_buildkit.returncode else "1"} | os.environ
    done = subprocess.run(
        [*command, "--file", "deploy/Dockerfile", "."],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=BUILD_SECONDS,
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"building {target} failed:\n{done.stdout[-4000:]}{done.stderr[-4000:]}")


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
    answer = ""
    while (message := await replies.next_msg(timeout=ANSWER_SECONDS)).data:
        chunk: dict[str, Any] = json.loads(message.data)
        if "error" in chunk:
            raise SystemExit(f"an error came back: {chunk}")
        answer += "".join(choice["delta"].get("content") or "" for choice in chunk["choices"])
    await replies.unsubscribe()
    headers = message.headers or {}
    return answer, headers["Infer-Worker"], headers["Infer-Prefill-Worker"]


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
            _check_paris(json.loads(reply.data)["choices"][0]["message"]["content"])
        with step("streamed answer"):
            _check_paris((await ask(connection))[0])
        with step("answer through the client's image"):
            _check_paris(await asyncio.to_thread(compose, "run", "--rm", "client", *CHAT))
        async with openai.AsyncOpenAI(
            base_url=f"http://127.0.0.1:{GATEWAY_PORT}/v1",
            api_key="none",
            max_retries=0,
            timeout=ANSWER_SECONDS,
        ) as gateway:
            with step("answer streamed to OpenAI's client"):
                _check_paris(await stream(gateway))
            with step(f"batch of {LINES} lines through OpenAI's files and batches"):
                await batch(gateway)
        with step("health checks pass"):
            await healthy("nats", "prefill", "decode", "gateway")
        with step("scaled to two decode workers"):
            compose("up", "--detach", "--scale", "decode=2")
            await ready(client, prefill=1, decode=2)
        with step("answers from both of them"):
            served: set[str] = set()
            for _ in range(16):
                answer, decode, _prefill = await ask(connection)
                _check_paris(answer)
                served.add(decode)
                if len(served) == 2:
                    break
            else:
                raise SystemExit(f"only {served} answered")
        with step("decode container killed in the middle of an answer, which went on"):
            killed = await interrupt(client, "kill")
            _check(exit_code(killed) == KILLED, f"{killed} was not killed")
        with step("killed container started again"):
            await asyncio.to_thread(_docker, "start", killed)
            await ready(client, prefill=1, decode=2)
        with step("decode container stopped in the middle of an answer, which ended there"):
            stopped = await interrupt(client, "stop --time 120")
            _check(exit_code(stopped) == 0, f"{stopped} did not drain")


async def stream(gateway: openai.AsyncOpenAI) -> str:
    """The question by OpenAI's client; the answer, which came in pieces and was counted."""
    pieces, usage = list[str](), None
    chunks = await gateway.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": QUESTION}],
        temperature=0,
        max_tokens=32,
        stream=True,
        stream_options={"include_usage": True},
    )
    async for chunk in chunks:
        pieces += [choice.delta.content for choice in chunk.choices if choice.delta.content]
        usage = chunk.usage or usage
    _check(len(pieces) > 1 and usage is not None, f"not a stream: {pieces}, {usage}")
    return "".join(pieces)


async def batch(gateway: openai.AsyncOpenAI) -> None:
    """A file of questions by OpenAI's client; every line is answered once, and the files are removed."""
    asked = {f"question-{number}" for number in range(LINES)}
    lines = [
        {"custom_id": name, "method": "POST", "url": ENDPOINT, "body": {**BODY, "model": MODEL}}
        for name in sorted(asked)
    ]
    content = "".join(json.dumps(line) + "\n" for line in lines).encode()
    uploaded = await gateway.files.create(file=("questions.jsonl", content), purpose="batch")
    ran = await gateway.batches.create(input_file_id=uploaded.id, endpoint=ENDPOINT, completion_window="24h")
    async with asyncio.timeout(ANSWER_SECONDS):
        while ran.status not in {"completed", "failed", "expired", "cancelled"}:
            await asyncio.sleep(0.5)
            ran = await gateway.batches.retrieve(ran.id)
    counts = ran.request_counts
    _check(ran.status == "completed" and ran.output_file_id is not None, f"the batch ended as {ran}")
    _check(counts is not None and (counts.completed, counts.failed) == (LINES, 0), f"counts: {counts}")
    output = await gateway.files.content(str(ran.output_file_id))
    answers = [json.loads(line) for line in output.text.splitlines()]
    _check(len(answers) == LINES, f"{len(answers)} lines came back")
    _check({answer["custom_id"] for answer in answers} == asked, f"of other lines: {answers}")
    for answer in answers:
        _check_paris(answer["response"]["body"]["choices"][0]["message"]["content"])
    await gateway.files.delete(uploaded.id)
    await gateway.files.delete(str(ran.output_file_id))


async def healthy(*services: str) -> None:
    """Wait until Docker calls every container of these services healthy."""
    containers = (await asyncio.to_thread(compose, "ps", "--quiet", *services)).split()
    _check(len(containers) >= len(services), f"not all run: {containers}")
    async with asyncio.timeout(READY_SECONDS):
        while True:
            said = [
                _docker("inspect", "--format", "{{.State.Health.Status}}", one).strip() for one in containers
            ]
            if set(said) == {"healthy"}:
                return
            await asyncio.sleep(1)


def _check_paris(answer: str) -> None:
    _check("Paris" in answer, f"not the answer about Paris: {answer!r}")


async def interrupt(client: Client, command: str) -> str:
    """Runs `docker COMMAND` on the decode worker of a job in the middle of its answer, which has to go on.

    Returns:
        The container.
    """
    job = await client.submit("chat", MODEL, LONG)
    container, before, chunks = "", "", 0
    async with asyncio.timeout(ANSWER_SECONDS):
        async for chunk in client.stream(job):
            chunks += 1
            if chunks <= BEGUN:
                before += text(chunk)
            if chunks == BEGUN:
                container = await _serving(client)
                await asyncio.to_thread(_docker, *command.split(), container)
        answer: Any = (await client.result(job)).answer
    _check(chunks > BEGUN, "the answer was too short to be interrupted")
    _check(answer["choices"][0]["message"]["content"].startswith(before), "another answer began")
    _check(answer["usage"]["completion_tokens"] == LONG["max_tokens"], f"it ended early: {answer['usage']}")
    return container


async def _serving(client: Client) -> str:
    """The container of the decode worker that is busy."""
    async with asyncio.timeout(ANSWER_SECONDS):
        while True:
            for info in await client.workers():
                if info.role == "decode" and info.state == "ready" and info.load.busy:
                    return info.host
            await asyncio.sleep(0.1)


def _docker(*arguments: str) -> str:
    command = ["docker", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=DOCKER_SECONDS, check=True).stdout


def _check(fine: bool, otherwise: str) -> None:
    if not fine:
        raise SystemExit(otherwise)


def exit_codes(*services: str) -> dict[str, int]:
    """How the containers of these services ended."""
    ids = compose("ps", "--all", "--quiet", *services).split()
    return {identity[:12]: exit_code(identity) for identity in ids}


def exit_code(container: str) -> int:
    """How a container ended."""
    return int(_docker("inspect", "--format", "{{.State.ExitCode}}", container))


def labelled() -> None:
    """Both images say what they are, run as nobody in particular, and only the worker's checks its health."""
    for image, checked in (("inferbus:cpu", True), ("inferbus:client", False)):
        [found] = json.loads(_docker("image", "inspect", image))
        config = found["Config"]
        labels = config["Labels"]
        _check(labels["org.opencontainers.image.title"] == "inferbus", f"labels of {image}: {labels}")
        _check(config["User"] == "10001:10001", f"{image} runs as {config['User']}")
        _check(bool(config.get("Healthcheck")) == checked, f"health check of {image}")
        sys.stdout.write(f"           {image}: {found['Size'] / 1e6:,.0f} MB\n")


def main() -> None:
    """Run the check."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--build", action="store_true", help="build the image first, although there is one")
    options = parser.parse_args()
    try:
        if options.build:
            with step("images built"):
                for target in ("client", "cpu"):
                    build(target)
        labelled()
        with step("containers started, demo model prepared"):
            compose("up", "--detach")
        asyncio.run(talk())
        with step("workers and gateway drained and stopped"):
            compose("stop", "prefill", "decode", "gateway")
        codes = exit_codes("prefill", "decode", "gateway")
        _check(list(codes.values()) == [0, 0, 0, 0], f"they did not all end with 0: {codes}")
    except BaseException:
        sys.stdout.write(compose("logs", "--no-color", "--tail", "40"))
        raise
    finally:
        with step("down"):
            compose("down", "--volumes")


if __name__ == "__main__":
    main()
