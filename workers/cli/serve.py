"""`inferbus worker` and `up`: the programs that serve."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shlex
import shutil
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, get_args

import click

from inferbus.schemas.fleet import Role
from inferbus.schemas.subjects import escape
from inferbus.workers.cli.options import CONFIG_ENV, Command, settings_of, settings_options
from inferbus.workers.cli.prerequisites import check_demo_model, check_gateway, check_worker
from inferbus.workers.cli.running import EXIT_FAILED, run_coroutine
from inferbus.workers.config import Settings, options
from inferbus.workers.observe import logs

if TYPE_CHECKING:
    from inferbus.workers.stack.local import LocalStack
    from inferbus.workers.stack.mps import Mps

DEMO: Final = "smollm2-135m-instruct"
QUESTION: Final = "What is the capital of France?"
_PASSING: Final = {"ignore_unknown_options": True}


@click.command(cls=Command, context_settings=_PASSING)
@click.argument("role", type=click.Choice(get_args(Role)))
@click.option(
    "--scripted",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Replay a script instead of running SGLang.",
)
@click.argument("engine_flags", nargs=-1, type=click.UNPROCESSED, metavar="[SGLANG FLAGS]...")
@settings_options("bus", "worker", "streams")
def worker(role: Role, scripted: Path | None, engine_flags: tuple[str, ...], **options: Any) -> int:
    """Run a worker until it is stopped.

    SIGTERM lets running requests finish and takes no new ones; a second one hurries.

    Every flag of SGLang's server passes through unchanged: `inferbus worker decode --model-path … --tp 2`.
    Put the role first, and after `--` whatever SGLang shall have although it looks like one of these options.
    """
    settings = settings_of(options)
    if scripted is not None and engine_flags:
        raise click.UsageError(f"a scripted worker takes no SGLang flags: {_names(engine_flags)}")
    check_worker(scripted=scripted is not None, tracing=settings.worker.tracing)
    from inferbus.workers.roles import run

    return run(role, settings, engine_flags, scripted=scripted)


@click.command(cls=Command, context_settings=_PASSING)
@click.option("--model-path", metavar="PATH", help="Model folder or hub name; default: the demo model.")
@click.option("--port", type=int, default=4222, show_default=True, help="NATS port; 0 takes a free one.")
@click.option("--aggregated", is_flag=True, help="One worker of the role `both` instead of two.")
@click.option(
    "--mps", is_flag=True, help="Both workers on one GPU, at the same time: NVIDIA MPS, run for them."
)
@click.option(
    "--directory",
    type=click.Path(file_okay=False, path_type=Path),
    help="For streams and logs; default: temporary.",
)
@click.option(
    "--scripted",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Replay a script instead of running SGLang.",
)
@click.option("--no-gateway", is_flag=True, help="Without the HTTP gateway.")
@click.argument("engine_flags", nargs=-1, type=click.UNPROCESSED, metavar="[SGLANG FLAGS]...")
@settings_options("worker", "streams", "gateway")
def up(**flags: Any) -> int:
    """Run NATS, both workers and the HTTP gateway on this machine.

    A server with JetStream, a prefill worker, a decode worker and OpenAI's API, until Ctrl-C. Every flag of
    SGLang's server passes through unchanged to both workers, and so do their settings. With --metrics-port P,
    the second worker takes P + 1.
    """
    from inferbus.workers.stack.errors import StackError

    if flags["mps"] and flags["aggregated"]:
        raise click.UsageError("--mps is for two workers that share a GPU; --aggregated starts one")
    settings, env, gateway_env = _settings(flags)
    if flags["scripted"] is not None and flags["engine_flags"]:
        raise click.UsageError(f"scripted workers take no SGLang flags: {_names(flags['engine_flags'])}")
    check_worker(scripted=flags["scripted"] is not None, tracing=settings.worker.tracing)
    if flags["model_path"] is None and flags["scripted"] is None:
        check_demo_model()
    if not flags["no_gateway"]:
        check_gateway()
    logs.configure(level="ERROR", format="text")
    try:
        return run_coroutine(lambda: _up(settings, env, gateway_env, **flags))
    except StackError as error:
        click.echo(f"inferbus: {error}", err=True)
        return EXIT_FAILED


def _names(flags: tuple[str, ...]) -> str:
    """Flags without their values, which may be secrets."""
    return " ".join(flag.partition("=")[0] for flag in flags if flag.startswith("-")) or "a value"


def _settings(flags: dict[str, Any]) -> tuple[Settings, dict[str, str | None], dict[str, str | None]]:
    """The settings, and the variables that pass the given options on to workers and gateway.

    Removes them from `flags`.
    """
    if flags["worker"] is not None:
        raise click.UsageError("--worker names one worker, and there are several")
    env, gateway_env = _passed(flags, "worker", "streams"), _passed(flags, "gateway")
    return settings_of(flags), env, gateway_env


def _passed(flags: dict[str, Any], *sections: str) -> dict[str, str | None]:
    env: dict[str, str | None] = {}
    for option in options(*sections):
        if (value := flags[option.name]) not in (None, ()):
            env[option.env] = ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
    if flags["config"] is not None:
        env[CONFIG_ENV] = str(flags["config"].absolute())
    return env


async def _up(
    settings: Settings,
    env: dict[str, str | None],
    gateway_env: dict[str, str | None],
    model_path: str | None,
    port: int,
    aggregated: bool,
    mps: bool,
    directory: Path | None,
    scripted: Path | None,
    no_gateway: bool,
    engine_flags: tuple[str, ...],
) -> int:
    from inferbus.workers.stack.flags import placement
    from inferbus.workers.stack.local import LocalStack
    from inferbus.workers.stack.mps import Mps

    place = await asyncio.to_thread(placement, shared=mps)
    name = settings.worker.model or ("scripted" if scripted else _short(model_path) if model_path else DEMO)
    if model_path is None and scripted is None:
        model_path = str(await asyncio.to_thread(_demo_model))
    roles: tuple[Role, ...] = ("both",) if aggregated else ("prefill", "decode")
    service = Mps() if mps else None
    stack = LocalStack(
        model_path or "",
        model=name,
        roles=roles,
        # What the user says comes last, and the last one holds.
        flags=["--enable-cache-report", *(() if _sized(engine_flags) else place.flags)],
        role_flags={role: [*place.role_flags.get(role, ()), *engine_flags] for role in roles},
        env={**env, **place.env, **(service.env if service else {})},
        metrics_port=settings.worker.metrics_port,
        scripted=scripted,
        gateway=None if no_gateway else settings.gateway.listen,
        gateway_env=gateway_env,
        directory=directory,
        port=port,
        report=lambda line: click.echo(line, err=True),
    )
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    return await _until_stopped(stack, stop, service)


async def _until_stopped(stack: LocalStack, stop: asyncio.Event, mps: Mps | None) -> int:
    stopped = asyncio.create_task(stop.wait())
    running = asyncio.create_task(_run(stack, mps))
    await asyncio.wait({stopped, running}, return_when=asyncio.FIRST_COMPLETED)
    stopped.cancel()
    if not running.done():
        click.echo("stopping: running requests are finished first", err=True)
        running.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await running
    return 0


async def _run(stack: LocalStack, mps: Mps | None) -> None:
    click.echo("starting; the engines take a while to load", err=True)
    async with mps or contextlib.nullcontext(), stack:
        click.echo(_greeting(stack), err=True)
        raise await stack.failed()


def _greeting(stack: LocalStack) -> str:
    request = f"infer.request.{escape(stack.model)}.chat"
    return "\n".join(
        [
            "",
            f"ready: the model {stack.model} at {stack.url}; logs in {stack.directory}",
            # Greedy, since a small model is often wrong when it samples.
            f"  {_program()} chat --nats-url {stack.url} --temperature 0 '{QUESTION}'",
            f"  nats -s {stack.url} request --timeout 60s {request} "
            f"""'{{"messages": [{{"role": "user", "content": "{QUESTION}"}}], "temperature": 0}}'""",
            *_over_http(stack),
            "Ctrl-C stops it",
        ]
    )


def _over_http(stack: LocalStack) -> list[str]:
    if stack.gateway_url is None:
        return []
    asked = {"model": stack.model, "messages": [{"role": "user", "content": QUESTION}], "temperature": 0}
    return [
        f"  curl {stack.gateway_url}/v1/chat/completions -H 'Content-Type: application/json' "
        f"-d {shlex.quote(json.dumps(asked))}",
        f"  a browser: {stack.gateway_url}/",
    ]


def _program() -> str:
    """What to type for this program: `make up` runs it from an environment that is not on the PATH."""
    called = Path(sys.argv[0])
    if called.name != "inferbus" or shutil.which("inferbus"):
        return "inferbus"
    return os.path.relpath(called)


def _demo_model() -> Path:
    from inferbus.workers.stack import models

    said: set[str] = set()

    def report(what: str, _done: float | None) -> None:
        if what not in said:
            said.add(what)
            click.echo(what, err=True)

    return models.ensure("demo", report=report)


def _short(model_path: str) -> str:
    return Path(model_path).name


def _sized(flags: tuple[str, ...]) -> bool:
    return any(flag.startswith(("--max-total-tokens", "--mem-fraction-static")) for flag in flags)
