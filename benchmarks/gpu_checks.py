"""On one GPU, with a real model: is the batched copy right, and do failures end as they should there?

    python -m benchmarks.gpu_checks MODEL [--out FILE] [--prompts N] [--only-up] [SGLang's flags]

Three layouts stand beside each other on the GPU: the bare engine, a pair as it comes, and a pair without the
batched copy. All are given the same greedy prompts of many lengths, one at a time and then all at once. After
that the first pair is treated badly: a caller leaves, a job is cancelled, a decode worker is killed in
mid-sentence, and a prefill worker gets a hand-off whose decode never comes. When all of them have ended,
`inferbus up --mps` is run as a user would, and stopped. Exits with 1 if a check failed.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import re
import secrets
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, Final

import msgspec

from benchmarks import machine, report
from benchmarks.bare import read_arguments
from inferbus.schemas import codec, handoff
from inferbus.schemas.answers import TokenChunk
from inferbus.schemas.fleet import Role, WorkerInfo
from inferbus.workers.bus.connection.message import Message
from inferbus.workers.client import Client
from inferbus.workers.engine.sglang.options import BATCHED_COPY
from inferbus.workers.observe import logs
from inferbus.workers.stack.flags import placement
from inferbus.workers.stack.local import LocalStack
from inferbus.workers.stack.mps import PROGRAM as MPS
from inferbus.workers.stack.processes import Child, spawn
from inferbus.workers.stack.server import HOST

MODEL: Final = "m"
GREEDY: Final[dict[str, Any]] = {"temperature": 0, "max_tokens": 24}
LONG: Final[dict[str, Any]] = {"temperature": 0, "max_tokens": 1000, "ignore_eos": True}
START_SECONDS: Final = 200.0
ORPHAN_SECONDS: Final = 4.0
UP_SECONDS: Final = 90.0
"""That `inferbus up` may take to stop: each worker has its grace."""
MARK: Final = "BENCHMARK_UP"
"""Variable by which the processes of `inferbus up` are known, wherever they went."""
SETTINGS: Final[dict[str, str | None]] = {"INFERBUS_ANNOUNCE_INTERVAL": "0.2", "INFERBUS_ACK_WAIT": "4"}

QUESTIONS: Final = (
    "What is {}?",
    "Write one sentence about {}.",
    "Explain {} to a child.",
    "Why do people care about {}?",
    "Name three things that have to do with {}.",
    "What would the world be without {}?",
    "Tell me a short story about {}.",
    "Where does one find {}?",
    "Is {} old or new?",
    "Give me a question about {}, and its answer.",
)
TOPICS: Final = (
    *("rain", "gravity", "tea", "the sea", "a library", "bread", "the moon", "music", "winter", "a bridge"),
    *("trees", "glass", "a clock", "salt", "a river", "paper", "the sun", "honey", "a map", "iron"),
)
FACTS: Final = (
    "Water boils at one hundred degrees.",
    "The library opens at nine in the morning.",
    "A bridge joins the two sides of the river.",
    "Most of the bread is baked before dawn.",
    "The old clock in the hall is four minutes slow.",
    "Salt was once paid to soldiers.",
    "In winter the lake freezes over.",
)


def prompts_of(model: str, count: int) -> list[list[int]]:
    """Chat prompts, all different, from some thirty tokens to over a thousand."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    found = []
    for number in range(count):
        question = QUESTIONS[number % len(QUESTIONS)].format(TOPICS[number // len(QUESTIONS) % len(TOPICS)])
        before = " ".join(FACTS[(number + k) % len(FACTS)] for k in range(number * 7 % 120))
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": f"{before} {question}".strip()}],
            add_generation_prompt=True,
            tokenize=False,
        )
        found.append(list(tokenizer.encode(text)))
    return found


class Answers(msgspec.Struct):
    """What one layout said.

    Attributes:
        alone: Token ids for every prompt, one request at a time.
        together: The same, all requests at once.
        long: Of one long answer.
        seconds: For `alone` and `together`.
    """

    alone: list[list[int]] = []
    together: list[list[int]] = []
    long: list[int] = []
    seconds: list[float] = []


Ask = Callable[[list[int], dict[str, Any]], Awaitable[list[int]]]


async def asked(ask: Ask, prompts: list[list[int]]) -> Answers:
    """Puts all questions."""
    found, started = Answers(), time.monotonic()
    for ids in prompts:
        found.alone.append(await ask(ids, GREEDY))
    found.seconds.append(round(time.monotonic() - started, 1))
    started = time.monotonic()
    found.together = await asyncio.gather(*(ask(ids, GREEDY) for ids in prompts))
    found.seconds.append(round(time.monotonic() - started, 1))
    found.long = await ask(prompts[0], LONG)
    return found


def _bare_main(argv: list[str]) -> int:
    asked_for, out, model, *flags = argv
    prompts = msgspec.json.decode(Path(asked_for).read_bytes(), type=list[list[int]])
    arguments = read_arguments(["--model-path", model, "--host", HOST, *flags], MODEL)
    from sglang.srt.entrypoints.engine import Engine

    engine = Engine(server_args=arguments)

    async def ask(ids: list[int], how: dict[str, Any]) -> list[int]:
        sampling = {"max_new_tokens" if name == "max_tokens" else name: value for name, value in how.items()}
        steps = await engine.async_generate(input_ids=ids, sampling_params=sampling, stream=True)
        return [token async for step in steps for token in step["output_ids"]]

    try:
        found = asyncio.run(asked(ask, prompts))
    finally:
        engine.shutdown()
    report.write(Path(f"{out}.part"), msgspec.json.encode(found).decode()).rename(out)
    return 0


class Checks:
    """One run.

    Args:
        model: Folder.
        flags: SGLang's, for every engine.
        prompts: What is asked.
        folder: For logs.
    """

    def __init__(self, model: str, flags: list[str], prompts: list[list[int]], folder: Path) -> None:
        self._model = model
        self._place = placement(shared=True)
        self._flags = [*self._place.flags, *flags]
        self._prompts = prompts
        self._folder = folder
        self.found: dict[str, Any] = {}
        self.answers: dict[str, Answers] = {}
        self._started = time.monotonic()

    def say(self, line: str) -> None:
        """Tells where it is."""
        print(f"{time.monotonic() - self._started:6.1f} s  {line}", flush=True)

    async def all(self, *, faults: bool) -> None:
        """Everything."""
        async with AsyncExitStack() as stack:
            pair, pieces = (
                self._stack("pair", ("prefill", "decode", "decode") if faults else ("prefill", "decode"), {}),
                self._stack("pair-pieces", ("prefill", "decode"), {BATCHED_COPY: "0"}),
            )
            bare = asyncio.create_task(self._bare())
            stack.callback(bare.cancel)
            await asyncio.gather(stack.enter_async_context(pair), stack.enter_async_context(pieces))
            clients = [await stack.enter_async_context(Client.connect(each.url)) for each in (pair, pieces)]
            self.say("pairs are ready")
            names = ("pair", "pair-pieces")
            found = await asyncio.gather(bare, *(asked(_asking(each), self._prompts) for each in clients))
            self.answers = dict(zip(("bare", *names), found, strict=True))
            self._compare()
            self.say(f"compared: {json.dumps(self.found)}")
            if faults:
                for check in (self._leaving, self._cancelling, self._orphan, self._killing):
                    name = check.__name__.strip("_")
                    try:
                        async with asyncio.timeout(60):
                            self.found[name] = await check(clients[0], pair)
                    except Exception as error:  # noqa: BLE001 - the other checks are wanted all the same
                        self.found[name] = {"ok": False, "error": f"{type(error).__name__}: {error}"}
                    self.say(f"{name}: {json.dumps(self.found[name])}")

    async def up(self) -> None:
        """The command that starts all of it, on a GPU that prefill and decode share at the same time."""
        if shutil.which(MPS) is None:
            self.found["up"] = {"ok": True, "skipped": f"{MPS} is not on PATH"}
        else:
            try:
                self.found["up"] = await self._up()
            except Exception as error:  # noqa: BLE001 - what was found before is wanted all the same
                self.found["up"] = {"ok": False, "error": f"{type(error).__name__}: {error}"}
        self.say(f"up: {json.dumps(self.found['up'])}")

    async def _up(self) -> dict[str, Any]:
        log, mark, began = self._folder / "up.log", secrets.token_hex(8), time.monotonic()
        command = [sys.executable, "-m", "inferbus.workers.cli", "up", "--mps", "--model-path", self._model]
        command += ["--served-model", MODEL, "--port", "0", "--directory", str(self._folder / "up")]
        child = await spawn("up", [*command, *self._flags], log=log, env={MARK: mark})
        try:
            ready = re.compile(rf"ready: the model {MODEL} at (nats://\S+);")

            async def said() -> bool:
                return ready.search(log.read_text()) is not None

            await child.until(said, timeout=START_SECONDS, poll=0.2)
            after = time.monotonic() - began
            found = ready.search(log.read_text())
            assert found is not None
            async with Client.connect(found[1]) as client:
                question = [{"role": "user", "content": QUESTIONS[0].format(TOPICS[0])}]
                async with asyncio.timeout(60):
                    answer: Any = await client.chat(MODEL, question, **GREEDY).answer()
                roles = sorted(info.role for info in await client.workers())
            running = {*_marked(mark), *_below(child.pid)}
            stopping = time.monotonic()
            child.send_signal(signal.SIGINT)
            async with asyncio.timeout(UP_SECONDS):
                code = await child.wait()
            stopped = time.monotonic() - stopping

            def left() -> list[str]:
                return [_name(pid) for pid, start in {*running, *_marked(mark)} if _start(pid) == start]

            async def gone() -> bool:
                return not left()

            # The kernel takes a moment to be done with what was killed.
            with contextlib.suppress(TimeoutError):
                await _until(gone)
        finally:
            child.kill()
            for pid, _ in [*_marked(mark)]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        tokens = answer["usage"]["completion_tokens"]
        return {
            "ok": code == 0 and not left() and tokens > 0 and roles == ["decode", "prefill"],
            "ready after s": round(after, 1),
            "tokens": tokens,
            "processes": len(running),
            "exit code": code,
            "stopped after s": round(stopped, 1),
            "left": left(),
        }

    def _stack(self, name: str, roles: tuple[Role, ...], env: dict[str, str | None]) -> LocalStack:
        return LocalStack(
            self._model,
            model=MODEL,
            roles=roles,
            flags=self._flags,
            role_flags=self._place.role_flags,
            env={**self._place.env, **SETTINGS, **env},
            directory=self._folder / name,
            ready_timeout=START_SECONDS,
            grace=1.0,
        )

    async def _bare(self) -> Answers:
        asked_for, out = (self._folder / name for name in ("prompts.json", "answers.json"))
        report.write(asked_for, json.dumps(self._prompts))
        program = [sys.executable, "-m", "benchmarks.gpu_checks", "--bare", str(asked_for), str(out)]
        env = {**self._place.env, "SGLANG_HOST_IP": HOST}
        child: Child = await spawn(
            "bare", [*program, self._model, *self._flags], log=self._folder / "bare.log", env=env
        )
        try:
            if await child.wait() != 0:
                raise child.exited()
        finally:
            child.kill()
        return msgspec.json.decode(out.read_bytes(), type=Answers)

    def _compare(self) -> None:
        bare = self.answers["bare"]
        for name in ("pair", "pair-pieces"):
            mine = self.answers[name]
            self.found[name] = {
                "alone": _same(mine.alone, bare.alone),
                "together": _same(mine.together, bare.together),
                "together as alone": _same(mine.together, mine.alone),
                "seconds": mine.seconds,
            }
        self.found["bare"] = {
            "together as alone": _same(bare.together, bare.alone),
            "different answers": len({tuple(each) for each in bare.alone}),
            "seconds": bare.seconds,
        }
        self.found["prompts"] = {
            "count": len(self._prompts),
            "shortest": min(map(len, self._prompts)),
            "longest": max(map(len, self._prompts)),
        }

    async def _leaving(self, client: Client, _stack: LocalStack) -> dict[str, Any]:
        """A live caller leaves in mid-sentence: the engines stop."""
        chunks = 0
        async with client.tokens(MODEL, self._prompts[0], **LONG) as stream:
            async for _ in stream:
                chunks += 1
                # The registry is a fifth of a second behind; it has to have seen the request first.
                if chunks >= 5 and not await _idle(client):
                    break
        left = time.monotonic()
        await _until(lambda: _idle(client))
        cut = chunks < LONG["max_tokens"]
        return {"ok": cut, "chunks": chunks, "idle after s": round(time.monotonic() - left, 2)}

    async def _cancelling(self, client: Client, _stack: LocalStack) -> dict[str, Any]:
        """A durable job is cancelled while it runs."""
        job = await client.submit("tokens", MODEL, {"token_ids": self._prompts[1], **LONG})
        chunks = 0
        async for _ in client.stream(job):
            chunks += 1
            if chunks == 5:
                break
        began = time.monotonic()
        await client.cancel(job)
        status, after = "", 0.0
        try:
            status = (await client.result(job, timeout=20)).status
        except Exception as error:  # noqa: BLE001 - a cancelled job's result is an error, and that is looked at
            status = getattr(error, "code", type(error).__name__)
        after = time.monotonic() - began
        await _until(lambda: _idle(client))
        return {"ok": status == "cancelled", "status": status, "result after s": round(after, 3)}

    async def _orphan(self, client: Client, _stack: LocalStack) -> dict[str, Any]:
        """A hand-off whose decode never comes: prefill gives up by itself, and goes on serving."""
        prefill = next(info for info in await client.workers() if info.role == "prefill")
        answers = await self._hand_off(client, prefill)
        began = time.monotonic()
        first = await asyncio.wait_for(answers.get(), 10)
        last = await asyncio.wait_for(answers.get(), 30)
        after = time.monotonic() - began
        good = await _asking(client)(self._prompts[2], GREEDY)
        await _until(lambda: _idle(client))
        failed = isinstance(last, handoff.Failed)
        return {
            "ok": isinstance(first, handoff.Accepted) and failed and good == self.answers["bare"].alone[2],
            "timeout s": ORPHAN_SECONDS,
            "failed after s": round(after, 2),
            "said": last.error.message if isinstance(last, handoff.Failed) else str(last),
        }

    async def _hand_off(self, client: Client, prefill: WorkerInfo) -> asyncio.Queue[handoff.FromPrefill]:
        assert prefill.signature is not None
        body = handoff.Prefill(
            rid=secrets.token_hex(16),
            room=secrets.randbelow(2**62) + 1,
            token_ids=self._prompts[3],
            sampling={"temperature": 0, "max_new_tokens": 8},
            worker="nobody",
            job="orphan",
            signature=prefill.signature,
            timeout=ORPHAN_SECONDS,
        )
        answers: asyncio.Queue[handoff.FromPrefill] = asyncio.Queue()

        def received(message: Message) -> None:
            answers.put_nowait(msgspec.msgpack.decode(message.data, type=handoff.FromPrefill))

        inbox = client.bus.inbox(received)
        subject = client.bus.subjects.prefill(MODEL, prefill.worker)
        client.bus.send(subject, codec.encode(body, codec.MSGPACK), {}, reply=inbox.subject)
        return answers

    async def _killing(self, client: Client, stack: LocalStack) -> dict[str, Any]:
        """A decode worker and its engine are killed in mid-sentence; the other one finishes the job."""
        job = await client.submit("tokens", MODEL, {"token_ids": self._prompts[0], **LONG})
        killed, began, chunks = "", 0.0, 0
        tokens: list[int] = []
        stream = client.stream(job)
        async for event in stream:
            if isinstance(event, TokenChunk):
                tokens += event.token_ids
                chunks += 1
            if not killed and chunks >= 20:
                busy = [each for each in await client.workers() if each.role == "decode" and each.load.busy]
                if busy:
                    killed, began = busy[0].worker, time.monotonic()
                    before = len(tokens)
                    stack.workers[killed].kill()
        result: Any = await client.result(job, timeout=60)
        answer = result.answer.choices[0].token_ids
        whole = self.answers["bare"].long
        same = next((k for k, (a, b) in enumerate(zip(answer, whole, strict=False)) if a != b), len(whole))
        return {
            "ok": bool(killed)
            and result.attempt > 1
            and result.worker != killed
            and len(answer) == len(whole),
            "attempt": result.attempt,
            "tokens before": before if killed else 0,
            "done after s": round(time.monotonic() - began, 2),
            "equal tokens": [same, len(whole)],
        }


def _asking(client: Client) -> Ask:
    async def ask(ids: list[int], how: dict[str, Any]) -> list[int]:
        answer: Any = await client.tokens(MODEL, ids, **how).answer()
        tokens: list[int] = answer.choices[0].token_ids
        return tokens

    return ask


def _marked(mark: str) -> Iterator[tuple[int, str]]:
    """Processes that were started with a mark in their environment, with the moments of their starts."""
    wanted = f"{MARK}={mark}".encode()
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if wanted in (entry / "environ").read_bytes().split(b"\0"):
                yield int(entry.name), _start(int(entry.name))
        except OSError:
            continue


def _below(pid: int) -> Iterator[tuple[int, str]]:
    """A process and its descendants; SGLang's rename themselves, and their environment goes with that."""
    parents = {int(entry.name): _stat(int(entry.name))[1:2] for entry in Path("/proc").glob("[0-9]*")}
    found = [pid]
    for each in found:
        found += [child for child, parent in parents.items() if parent == [str(each)]]
        yield each, _start(each)


def _stat(pid: int) -> list[str]:
    """State, parent and so on; nothing of a process that is gone, or whose parent has yet to take note."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []
    return [] if fields[0] in "ZX" else fields


def _start(pid: int) -> str:
    return "".join(_stat(pid)[19:20])


def _name(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""


def _same(mine: Sequence[list[int]], theirs: Sequence[list[int]]) -> int:
    return sum(a == b for a, b in zip(mine, theirs, strict=True))


async def _idle(client: Client) -> bool:
    return all(info.load.busy == 0 and info.load.running == 0 for info in await client.workers())


async def _until(true: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(20):
        while not await true():  # noqa: ASYNC110 - it is the registry that is asked
            await asyncio.sleep(0.05)


def main(arguments: Sequence[str] | None = None) -> int:
    """Checks, prints, writes what was found."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_checks", description="See the module.")
    parser.add_argument("model")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--logs", type=Path)
    parser.add_argument("--prompts", type=int, default=200)
    parser.add_argument("--no-faults", action="store_true", help="compare answers, and treat nothing badly")
    parser.add_argument("--only-up", action="store_true", help="run `inferbus up --mps`, and no more")
    options, flags = parser.parse_known_args(arguments)
    logs.configure(level="ERROR", format="text")
    taken, versions = report.now(), machine.versions()
    with tempfile.TemporaryDirectory(prefix="inferbus-checks-") as temporary:
        folder = options.logs or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        prompts = [] if options.only_up else prompts_of(options.model, options.prompts)
        checks = Checks(options.model, flags, prompts, folder)

        async def run() -> None:
            if prompts:
                await checks.all(faults=not options.no_faults)
            await checks.up()

        try:
            asyncio.run(run())
        finally:
            done = {
                "name": "gpu-checks",
                "taken": taken,
                "versions": versions,
                "machine": msgspec.to_builtins(machine.Machine.here()),
                "flags": flags,
                "found": checks.found,
                "first answers": [each.alone[:3] for each in checks.answers.values()],
            }
            if options.out is not None:
                report.write(options.out, json.dumps(done, indent=1) + "\n")
    right = not prompts or checks.found["pair"]["alone"] == len(prompts)
    ended = all(each.get("ok", True) for each in checks.found.values())
    return 0 if right and ended else 1


if __name__ == "__main__":
    given = sys.argv[1:]
    sys.exit(_bare_main(given[1:]) if given[:1] == ["--bare"] else main(given))
