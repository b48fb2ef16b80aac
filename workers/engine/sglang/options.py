"""From SGLang's command line to its server arguments, with what a worker decides itself filled in.

SGLang's own parser reads the flags, so every one of them passes through. What
is ours: the disaggregation mode (it follows from the role), streaming by
increments (all code here relies on it), and the bootstrap server's address.
"""

from __future__ import annotations

import argparse
import contextlib
import ipaddress
import os
import platform
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, NoReturn

import msgspec

from inferbus.schemas.fleet import Bootstrap, Role
from inferbus.workers.engine import cpu
from inferbus.workers.engine.sglang import parsers, scheduling
from inferbus.workers.engine.sglang.redaction import remember_secrets, without_secrets
from inferbus.workers.engine.sglang.startup import LaunchFailed

MODES: Final[dict[Role, str]] = {"prefill": "prefill", "decode": "decode", "both": "null"}

LOG_LEVEL: Final = "warning"
"""SGLang logs a line a batch at its own default, `info`."""

TRANSFER_SECONDS: Final = 30.0
"""How long one side of a transfer waits for the other: 300 s in SGLang, for which a decode slot is held
when a prefill was aborted or died; that turns one loss into an outage (sgl-project/sglang#28651)."""

HEARTBEAT_SECONDS: Final = 2.0
"""Decode gives a prefill up after two missed heartbeats; 5 s apart in SGLang."""

BATCHED_COPY: Final = "NIXL_UCX_SGL_ENABLE"
"""Has NIXL's UCX plugin write a request's KV cache as one list, which CUDA copies at once, not piece by
piece. There are two pieces for every layer and run of pages; each waits for its turn on a busy GPU."""

_ANY: Final = ("0.0.0.0", "::", "")  # noqa: S104


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """How to start an engine.

    Attributes:
        role: Of the worker.
        arguments: SGLang's `ServerArgs`.
        bootstrap: Where a prefill engine's bootstrap server is reached from other hosts.
    """

    role: Role
    arguments: Any
    bootstrap: Bootstrap | None = None


def prepare_environment(transfer_timeout: float) -> None:
    """Sets environment variables that SGLang and PyTorch read when they load; the user's own stay."""
    seconds = max(1, round(transfer_timeout))
    values = {
        "SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT": str(seconds),
        # Decode has to be the first to give up. Only then does it forget its connection to a prefill that was
        # replaced at the same address, which it cannot detect otherwise; a leg that is aborted leaves it in
        # use, and every later one would fail as well (sgl-project/sglang#34289).
        "SGLANG_DISAGGREGATION_WAITING_TIMEOUT": str(max(1, seconds - 1)),
        "SGLANG_DISAGGREGATION_HEARTBEAT_INTERVAL": str(HEARTBEAT_SECONDS),
    }
    for name, value in values.items():
        os.environ.setdefault(name, value)


def read(
    argv: Sequence[str],
    *,
    role: Role,
    model: str | None = None,
    bootstrap_port: int | None = None,
    advertise_host: str | None = None,
) -> Options:
    """Parses SGLang's flags and adds what the role needs; see `SGLangEngine.launch`.

    Raises:
        LaunchFailed: A flag is unknown, lacks its value, or contradicts the role.
    """
    parser = _parser()
    argv = _with_config_file(parser, list(argv))
    given = _given(argv)
    values = parser.parse_args(argv)
    remember_secrets(values)
    _check_paths(values)
    # ServerArgs takes this one from here, as SGLang's own entry point has it.
    values._radix_eviction_policy_explicitly_set = "radix_eviction_policy" in given
    _check(given, role)
    own = _own(role, given, model=model, bootstrap_port=bootstrap_port, advertise_host=advertise_host)
    for name, value in own.items():
        setattr(values, name, value)
    parsers.choose(parser, values, given, role)
    bootstrap = None
    if role == "prefill":
        fixed = bootstrap_port or "disaggregation_bootstrap_port" in given
        wanted = values.disaggregation_bootstrap_port if fixed else 0
        values.disaggregation_bootstrap_port = _free_port(values.host, wanted)
        bootstrap = _bootstrap(values, advertise_host)
        batch_copies(values.disaggregation_transfer_backend)
    _set_own_address(bootstrap, advertise_host)
    if cpu.cpu_only():
        cpu.prepare_environment(values.tp_size * values.pp_size * values.dp_size)
    try:
        arguments = _server_args().from_cli_args(values)
    except Exception as error:  # foreign code: it reads the model's files, from a hub where they are not here
        raise LaunchFailed(one_line(error)) from error
    return Options(role=role, arguments=arguments, bootstrap=bootstrap)


def one_line(error: BaseException) -> str:
    """An exception's first line with something on it, or its name; without secrets."""
    lines = (line.strip() for line in without_secrets(str(error)).splitlines())
    return next((line for line in lines if line), type(error).__name__)[:500]


def _server_args() -> Any:
    from sglang.srt.server_args import ServerArgs

    return ServerArgs


class _Parser(argparse.ArgumentParser):
    """Raises instead of ending the process, and repeats no value of an option that it does not know."""

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """The options."""
        found, rest = self.parse_known_args(args, namespace)
        if rest:
            unknown = [each.partition("=")[0] for each in rest if each.startswith("-")]
            self.error(f"there is no {', '.join(unknown)}" if unknown else "a value belongs to no option")
        return found

    def error(self, message: str) -> NoReturn:
        raise LaunchFailed(f"SGLang's options: {message}")


def _parser() -> argparse.ArgumentParser:
    # Abbreviations stay allowed, as in SGLang.
    parser = _Parser(prog="sglang", add_help=False)
    _server_args().add_cli_args(parser)
    parsers.offer_none(parser)
    return parser


def _with_config_file(parser: argparse.ArgumentParser, argv: list[str]) -> list[str]:
    """Merges the YAML file of SGLang's `--config` into the flags, as SGLang's own entry point does."""
    if "--config" not in argv:
        return argv
    try:
        from sglang.srt.utils.server_args_config_parser import ConfigArgumentMerger
    except ImportError:  # SGLang 0.5.17
        from sglang.srt.server_args_config_parser import ConfigArgumentMerger
    try:
        merged: list[str] = ConfigArgumentMerger(parser).merge_config_with_args(argv)
    except (ValueError, OSError) as error:
        raise LaunchFailed(f"SGLang's --config: {one_line(error)}") from error
    return merged


def _given(argv: list[str]) -> dict[str, Any]:
    """The options that the user gave, by field, without defaults."""
    parser = _parser()
    for action in parser._actions:
        action.default = argparse.SUPPRESS
        action.required = False
    return vars(parser.parse_args(argv))


def _check_paths(values: argparse.Namespace) -> None:
    """A folder that is not there would be taken for a name in a model hub."""
    for name in ("model_path", "tokenizer_path"):
        path = getattr(values, name, None) or ""
        if path.startswith(("/", "./", "../", "~")) and not Path(path).expanduser().exists():
            raise LaunchFailed(f"{_flag(name)}: no such folder: {path}")


def _check(given: dict[str, Any], role: Role) -> None:
    mode = given.get("disaggregation_mode", MODES[role])
    if mode != MODES[role]:
        raise LaunchFailed(f"--disaggregation-mode {mode} contradicts the role {role}; leave the flag out")
    for name, wanted, why in (
        ("node_rank", 0, "only the first node of an engine can be a worker"),
        ("tokenizer_worker_num", 1, "an embedded engine tokenises in the worker's process"),
        ("enable_pd_role_switch", False, "a worker's role is fixed"),
    ):
        if given.get(name, wanted) != wanted:
            raise LaunchFailed(f"{_flag(name)} is not supported: {why}")
    if role != "both" and given.get("is_embedding"):
        raise LaunchFailed(f"--is-embedding contradicts the role {role}: embeddings need the role both")
    if role == "both" and "disaggregation_bootstrap_port" in given:
        raise LaunchFailed("--disaggregation-bootstrap-port contradicts the role both")


def _own(
    role: Role,
    given: dict[str, Any],
    *,
    model: str | None,
    bootstrap_port: int | None,
    advertise_host: str | None,
) -> dict[str, Any]:
    """The values that are the worker's to decide, and defaults for those that the user left out."""
    for flag, own in (("served_model_name", model), ("disaggregation_bootstrap_port", bootstrap_port)):
        if own and given.get(flag, own) != own:
            raise LaunchFailed(f"{_flag(flag)} {given[flag]} contradicts the worker's own setting, {own}")
    defaults: dict[str, Any] = {"log_level": LOG_LEVEL}
    defaults |= scheduling.defaults(role, given, gpu=not cpu.cpu_only())
    if cpu.cpu_only():
        _check_processor()
        defaults |= cpu.defaults(role)
    if role != "both":
        defaults["disaggregation_transfer_backend"] = "nixl"
    if role == "prefill":
        defaults["host"] = advertise_host if _is_loopback(advertise_host) else _ANY[0]
    fields = _fields()
    values = {name: value for name, value in defaults.items() if name in fields and name not in given}
    values |= {"disaggregation_mode": MODES[role], "incremental_streaming_output": True}
    if model:
        values["served_model_name"] = model
    if bootstrap_port:
        values["disaggregation_bootstrap_port"] = bootstrap_port
    return values


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _check_processor() -> None:
    if platform.machine() not in ("x86_64", "AMD64"):
        raise LaunchFailed(
            f"no accelerator is available, and this kind of CPU is not supported: {platform.machine()}"
        )


def _fields() -> frozenset[str]:
    """Server arguments that this version has: a msgspec struct in newer ones, a dataclass in older."""
    kind = _server_args()
    return frozenset(getattr(kind, "__struct_fields__", None) or kind.__dataclass_fields__)


def _free_port(host: str, port: int) -> int:
    """The port, or a free one for 0. SGLang only logs that it could not bind, so it is tried here."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            reason = error.strerror or str(error)
            raise LaunchFailed(f"the bootstrap server cannot listen on {host}:{port}: {reason}") from error
        chosen: int = probe.getsockname()[1]
        return chosen


def _bootstrap(values: argparse.Namespace, advertise_host: str | None) -> Bootstrap:
    host = advertise_host or (own_address() if values.host in _ANY else values.host)
    return Bootstrap(host=host, port=values.disaggregation_bootstrap_port)


def own_address() -> str:
    """This machine's address, as SGLang itself finds it for its KV transfer."""
    from sglang.srt.utils.network import get_local_ip_auto

    address: str = get_local_ip_auto("127.0.0.1")
    return address


def _set_own_address(bootstrap: Bootstrap | None, advertise_host: str | None) -> None:
    """Makes the KV transfer listen at the announced address; SGLang would guess one."""
    address = advertise_host or (bootstrap.host if bootstrap and _is_loopback(bootstrap.host) else None)
    with contextlib.suppress(ValueError):  # SGLang can bind an address, not a name.
        if address is not None:
            os.environ.setdefault("SGLANG_HOST_IP", str(ipaddress.ip_address(address)))


def batch_copies(backend: str) -> None:
    """Turns the batched copy on for a prefill engine, the side that writes; a user's own value stays.

    Args:
        backend: Of the KV transfer. Only NIXL's UCX plugin reads the variable, and host memory gains nothing.
    """
    plugin = os.environ.get("SGLANG_DISAGGREGATION_NIXL_BACKEND") or "UCX"
    if backend == "nixl" and plugin == "UCX" and not cpu.cpu_only():
        os.environ.setdefault(BATCHED_COPY, "1")


def _is_loopback(host: str | None) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host or "").is_loopback
    except ValueError:
        return False
