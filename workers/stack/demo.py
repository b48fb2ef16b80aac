"""The main job, shown: three requests through a prefill worker and a decode worker on this machine.

    python -m inferbus.workers.stack.demo

A chat request and a token request go over core NATS, a durable job through JetStream; each answer is shown as
it arrives. The exit status is 0 when all three were answered.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.markup import escape
from rich.status import Status
from rich.text import Text

from inferbus.schemas.answers import TokenChunk
from inferbus.schemas.errors import InferbusError
from inferbus.workers.client import AnswerStream, Client, Restarted, Stats, text
from inferbus.workers.observe import logs
from inferbus.workers.stack import models
from inferbus.workers.stack.errors import StackError
from inferbus.workers.stack.flags import placement
from inferbus.workers.stack.gguf import Report
from inferbus.workers.stack.local import LocalStack

MODEL: Final = "smollm2-135m-instruct"
GREEDY: Final = {"temperature": 0, "max_tokens": 64}
SILENCE: Final = 120.0
"""Seconds without any news after which a request is given up; a loaded laptop is slow."""

CHAT: Final = "What is the capital of France?"
JOB: Final = "Name three primary colours."


class Screen:
    """What is shown: steps with a clock while they run, and answers as they arrive."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def line(self, markup: str = "") -> None:
        """Shows one line."""
        self._console.print(markup, highlight=False, soft_wrap=True)

    def field(self, name: str, value: str = "", *, end: str = "\n") -> None:
        """Shows a named line; with another `end`, the rest of it comes with `add`."""
        self._console.print(f"  [cyan]{name:<10}[/cyan] ", end="", highlight=False, soft_wrap=True)
        self.add(value + end)

    def done(self, what: str) -> None:
        """Shows a step that is done."""
        self.line(f"[green]✓[/green] {escape(what)}")

    @contextlib.contextmanager
    def step(self, what: str) -> Iterator[Report]:
        """Shows that something takes its time; what is yielded changes what is said of it."""
        if self._console.is_terminal:
            with _Clock(self._console, what) as clock:
                yield clock.say
        else:
            yield _Lines(self, what).say

    def add(self, piece: str) -> None:
        """Shows more of an answer, on the line where it stands."""
        self._console.print(Text(piece), end="", highlight=False, soft_wrap=True)
        self._console.file.flush()


class _Clock:
    """A spinner with the seconds it has been there."""

    def __init__(self, console: Console, what: str) -> None:
        self._what = what
        self._started = time.monotonic()
        self._status = Status(self, console=console)

    def say(self, what: str, done: float | None = None) -> None:
        self._what = what if done is None else f"{what}: {done:.0%}"

    def __rich__(self) -> Text:
        return Text(f"{self._what} · {time.monotonic() - self._started:.0f} s")

    def __enter__(self) -> _Clock:
        self._status.start()
        return self

    def __exit__(self, *_exception: object) -> None:
        self._status.stop()


class _Lines:
    """A line for each thing that is done, where lines cannot change in place."""

    def __init__(self, screen: Screen, what: str) -> None:
        self._screen = screen
        self._what = ""
        self.say(what)

    def say(self, what: str, _done: float | None = None) -> None:
        if what != self._what:
            self._what = what
            self._screen.line(f"… {escape(what)}")


async def run(console: Console) -> None:
    """Brings the stack up, sends the three requests, takes it down."""
    screen = Screen(console)
    screen.line("[bold]inferbus demo[/bold]: one prefill and one decode worker on this machine, NATS between")
    screen.line()
    folder = await _model(screen)
    async with _stack(screen, folder) as stack, Client.connect(stack.url, timeout=SILENCE) as client:
        failure = asyncio.create_task(stack.failed())
        requests = asyncio.create_task(_requests(screen, client, folder))
        try:
            await asyncio.wait([failure, requests], return_when=asyncio.FIRST_COMPLETED)
            if not requests.done():
                raise failure.result()
            await requests
        finally:
            for task in (failure, requests):
                task.cancel()
            await asyncio.gather(failure, requests, return_exceptions=True)
    screen.line()
    screen.done("everything that was started is stopped")


async def _model(screen: Screen) -> Path:
    with screen.step("Looking for the demo model") as report:
        folder = await asyncio.to_thread(models.ensure, "demo", report=report)
    screen.done(f"model SmolLM2-135M-Instruct in {folder}")
    return folder


@contextlib.asynccontextmanager
async def _stack(screen: Screen, folder: Path) -> AsyncIterator[LocalStack]:
    place = await asyncio.to_thread(placement)
    stack = LocalStack(
        folder,
        model=MODEL,
        flags=[*place.flags, "--enable-cache-report"],
        role_flags=place.role_flags,
        env=place.env,
        report=screen.done,
    )
    async with contextlib.AsyncExitStack() as exit_stack:
        with screen.step(f"Starting NATS and loading both engines on {place.where}; half a minute to two"):
            await exit_stack.enter_async_context(stack)
        yield stack
        # Entered by hand, so that stopping has its step too.
        with screen.step("Stopping the workers and the server"):
            await exit_stack.aclose()


async def _requests(screen: Screen, client: Client, folder: Path) -> None:
    await _chat(screen, client)
    await _tokens(screen, client, folder)
    await _job(screen, client)


async def _chat(screen: Screen, client: Client) -> None:
    _title(screen, 1, "a chat request, live", client.bus.subjects.request(MODEL, "chat"))
    screen.field("user", CHAT)
    await _show_text(screen, client.chat(MODEL, [{"role": "user", "content": CHAT}], **_options(usage=True)))


async def _tokens(screen: Screen, client: Client, folder: Path) -> None:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    prompt = tokenizer.encode(_rendered(CHAT)).ids
    _title(screen, 2, "a token request, live: ids in, ids out", client.bus.subjects.request(MODEL, "tokens"))
    screen.field("prompt", f"the same, as {len(prompt)} ids: {prompt[:3]} …")
    screen.field("answer", end="")
    stream = client.tokens(MODEL, prompt, **_options())
    ids: list[int] = []
    async for chunk in stream:
        assert isinstance(chunk, TokenChunk)
        ids += chunk.token_ids
        screen.add("".join(f"{token} " for token in chunk.token_ids))
    screen.line()
    screen.field("in text", tokenizer.decode(ids))
    _stats(screen, stream)


async def _job(screen: Screen, client: Client) -> None:
    body = {"messages": [{"role": "user", "content": JOB}], **_options(usage=True)}
    subject = client.bus.subjects.job(MODEL, "batch", client.owner, "chat")
    _title(screen, 3, "a durable job: stored, retried, finished exactly once", subject)
    screen.field("user", JOB)
    job = await client.submit("chat", MODEL, body)
    await _show_text(screen, client.stream(job, timeout=SILENCE))
    result = await client.result(job, timeout=SILENCE)
    screen.line(f"  [dim]stored as job {job.id}: {result.status}, attempt {result.attempt}[/dim]")


def _options(*, usage: bool = False) -> dict[str, Any]:
    return GREEDY | ({"stream_options": {"include_usage": True}} if usage else {})


async def _show_text(screen: Screen, stream: AnswerStream[Any]) -> None:
    screen.field("assistant", end="")
    async for event in stream:
        if isinstance(event, Restarted):
            screen.add("\n")
            screen.field("again", "a worker was lost; from the beginning: ", end="")
        else:
            screen.add(text(event).replace("\n", f"\n{'':13}"))
    screen.line()
    _stats(screen, stream)


def _title(screen: Screen, number: int, what: str, subject: str) -> None:
    screen.line()
    screen.line(f"[bold]{number} · {what}[/bold]")
    screen.field("subject", subject)


def _stats(screen: Screen, stream: AnswerStream[Any]) -> None:
    screen.line(f"  [yellow]{escape(Stats.of(stream).line())}[/yellow]")


def _rendered(question: str) -> str:
    """The model's chat template by hand: a client that sends ids renders and tokenises for itself."""
    system = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
    return (
        f"<|im_start|>system\n{system}<|im_end|>\n<|im_start|>user\n{question}<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def main() -> int:
    """Runs the demo; the exit status."""
    console = Console()
    logs.configure(level="ERROR")
    try:
        with _interrupted_by(signal.SIGTERM):
            asyncio.run(run(console))
    except (StackError, InferbusError) as error:
        console.print(f"[red]✗[/red] {escape(str(error))}", highlight=False, soft_wrap=True)
        return 1
    except KeyboardInterrupt:
        console.print("stopped")
        return 130
    return 0


@contextlib.contextmanager
def _interrupted_by(number: signal.Signals) -> Iterator[None]:
    """Lets a signal end the program in good order, as Ctrl-C does."""
    before = signal.signal(number, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(number, before)


if __name__ == "__main__":
    sys.exit(main())
