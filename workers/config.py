"""Everything that can be set: flags, environment and a TOML file, resolved once into frozen structs.

A flag wins over the environment, the environment over the file, the file over
the default. All problems are told together. The command line makes its options
from `options()`, so that a setting is written down once: here.

    section in the file   struct            flag              environment
    [nats]                BusSettings       --nats-url        INFERBUS_NATS_URL
    [worker]              WorkerSettings    --slots           INFERBUS_SLOTS
    [streams]             StreamSettings    --streams-…       INFERBUS_STREAMS_…
"""

from __future__ import annotations

import functools
import re
import secrets
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Final, TypeVar, get_args, get_origin, get_type_hints
from urllib.parse import urlsplit

import msgspec
from msgspec import Meta

from inferbus.schemas.errors import InferbusError
from inferbus.schemas.subjects import CLASSES, Subjects

ENVIRONMENT: Final = "INFERBUS_"
HIDDEN: Final = "***"
DAY: Final = 24 * 3600.0
MIB: Final = 1024 * 1024

_SCHEMES: Final = frozenset({"nats", "tls", "ws", "wss"})
_TOKEN: Final = re.compile(r"[A-Za-z0-9_-]+")

T = TypeVar("T")


class ConfigError(Exception):
    """Settings that cannot be used; `problems` names each setting and where it came from."""

    def __init__(self, problems: list[str]) -> None:
        self.problems = problems
        super().__init__("\n".join(["the settings cannot be used:", *(f"  {each}" for each in problems)]))


def _secret(help: str) -> Meta:
    return Meta(description=help, extra={"secret": True})


def _file(help: str) -> Meta:
    return Meta(description=help, extra={"file": True})


class _Section(msgspec.Struct, frozen=True, kw_only=True):
    """A group of settings that can be printed: secrets are hidden, also those inside URLs."""

    def __repr__(self) -> str:
        shown = (
            f"{name}={_shown(type(self), name, getattr(self, name))!r}" for name in self.__struct_fields__
        )
        return f"{type(self).__name__}({', '.join(shown)})"

    def problems(self) -> Iterator[tuple[str, str]]:
        """What no single field can tell: field and message."""
        yield from ()


class BusSettings(_Section, frozen=True, kw_only=True):
    """How to reach NATS."""

    urls: Annotated[
        tuple[str, ...],
        Meta(description="NATS server URL; several for a cluster.", min_length=1, extra={"name": "url"}),
    ] = ("nats://127.0.0.1:4222",)
    creds: Annotated[Path | None, _file("Credentials file (JWT and NKey seed).")] = None
    nkey: Annotated[Path | None, _file("File with an NKey seed.")] = None
    user: Annotated[str | None, Meta(description="User name.")] = None
    password: Annotated[str | None, _secret("Password.")] = None
    token: Annotated[str | None, _secret("Token.")] = None
    tls_ca: Annotated[Path | None, _file("CA certificates to trust instead of the system's.")] = None
    tls_cert: Annotated[Path | None, _file("Client certificate.")] = None
    tls_key: Annotated[Path | None, _file("Client certificate's key.")] = None
    prefix: Annotated[str, Meta(description="First token of every subject.")] = "infer"
    inbox_prefix: Annotated[
        str, Meta(description="Prefix of inboxes; one of one's own keeps answers private.")
    ] = "_INBOX"
    connect_timeout: Annotated[
        float, Meta(description="Seconds that a server may take to answer.", gt=0, le=600)
    ] = 5.0

    @property
    def subjects(self) -> Subjects:
        """The subjects under `prefix`."""
        return Subjects(self.prefix)

    def problems(self) -> Iterator[tuple[str, str]]:
        """Unusable URLs, and settings that exclude or need each other."""
        for url in self.urls:
            parts = urlsplit(url if "://" in url else f"nats://{url}")
            if parts.scheme not in _SCHEMES or not parts.hostname:
                yield (
                    "urls",
                    f"must be a nats://, tls://, ws:// or wss:// URL, not {hide_userinfo(url)!r}",
                )
        ways = [name for name in ("creds", "nkey", "user", "token") if getattr(self, name) is not None]
        if len(ways) > 1:
            yield ways[1], f"cannot be combined with {ways[0]}: one way to log in only"
        if (self.user is None) != (self.password is None):
            yield "user", "and password belong together"
        if (self.tls_cert is None) != (self.tls_key is None):
            yield "tls_cert", "and tls_key belong together"
        try:
            Subjects(self.prefix)
        except InferbusError as error:
            yield "prefix", error.message
        if not all(_TOKEN.fullmatch(token) for token in self.inbox_prefix.split(".")):
            yield "inbox_prefix", "must be tokens of letters, digits, '_' and '-'"


class WorkerSettings(_Section, frozen=True, kw_only=True):
    """How a worker takes and serves requests."""

    worker: Annotated[
        str, Meta(description="Worker id, unique among all; default: random.", max_length=64)
    ] = msgspec.field(default_factory=lambda: secrets.token_hex(6))
    model: Annotated[
        str | None,
        Meta(description="Model name to serve under; default: the engine's.", extra={"name": "served-model"}),
    ] = None
    slots: Annotated[
        int, Meta(description="Requests taken at once; 0: what the engine can run.", ge=0, le=65536)
    ] = 0
    live_share: Annotated[
        float, Meta(description="Share of the slots kept for live requests.", ge=0, le=1)
    ] = 0.25
    classes: Annotated[
        dict[str, Annotated[int, Meta(ge=1, le=1000)]],
        Meta(description="Job classes with their weights, as interactive:4,batch:1.", min_length=1),
    ] = msgspec.field(default_factory=lambda: {"interactive": 4, "batch": 1})
    ack_wait: Annotated[
        float, Meta(description="Seconds without a sign of life after which a job is delivered again.", ge=1)
    ] = 30.0
    max_attempts: Annotated[int, Meta(description="Attempts for one job.", ge=1, le=1000)] = 5
    grace: Annotated[float, Meta(description="Seconds for running jobs to finish after SIGTERM.", ge=0)] = (
        60.0
    )
    prefill_timeout: Annotated[float, Meta(description="Seconds that the prefill leg may take.", gt=0)] = 20.0
    bootstrap_host: Annotated[
        str | None, Meta(description="Address of this host as decode workers reach it; default: found out.")
    ] = None
    bootstrap_port: Annotated[
        int, Meta(description="Port of the KV transfer's bootstrap server; 0: a free one.", ge=0, le=65535)
    ] = 0
    announce_interval: Annotated[
        float, Meta(description="Seconds between announcements of this worker.", ge=0.1, le=3)
    ] = 2.0
    reply_prefixes: Annotated[
        tuple[str, ...],
        Meta(
            description="Where answers may go; a subject prefix ending in a dot.",
            extra={"name": "reply-prefix"},
        ),
    ] = ("_INBOX.",)
    deadline: Annotated[
        Annotated[float, Meta(gt=0)] | None,
        Meta(description="Deadline of requests that name none, seconds from arrival."),
    ] = None
    client_gone_every: Annotated[
        int, Meta(description="Ask with every k-th chunk whether a live caller is still there.", ge=1)
    ] = 16
    metrics_port: Annotated[
        Annotated[int, Meta(ge=0, le=65535)] | None,
        Meta(description="Port to serve Prometheus metrics on; 0: a free one; default: none."),
    ] = None
    metrics_host: Annotated[str, Meta(description="Address to serve them on.")] = "0.0.0.0"  # noqa: S104

    @property
    def heartbeat(self) -> float:
        """Seconds between signs of life for a held job: at most a third of the ack wait (trial A1)."""
        return self.ack_wait / 3

    def problems(self) -> Iterator[tuple[str, str]]:
        """Unknown classes, and reply prefixes that are none."""
        if unknown := sorted(set(self.classes) - set(CLASSES)):
            yield "classes", f"knows {', '.join(CLASSES)}; not {', '.join(unknown)}"
        for prefix in self.reply_prefixes:
            tokens = prefix.removesuffix(".").split(".")
            if not prefix.endswith(".") or not all(_TOKEN.fullmatch(token) for token in tokens):
                yield "reply_prefixes", f"must be plain tokens and end in a dot, not {prefix!r}"
        if self.prefill_timeout > 300:
            # SGLang gives up after 300 s by itself, and says less about why.
            yield "prefill_timeout", "must be at most 300"


class StreamSettings(_Section, frozen=True, kw_only=True):
    """Limits of the JetStream streams; ages in seconds, 0: no limit."""

    replicas: Annotated[
        int, Meta(description="Copies of every stream; three survive the loss of a server.", ge=1, le=5)
    ] = 1
    duplicate_window: Annotated[
        float, Meta(description="Seconds within which a second submission of one id is dropped.", ge=1)
    ] = 600.0
    jobs_max_bytes: Annotated[
        int, Meta(description="Largest queue of jobs; beyond it submitters are refused.", ge=MIB)
    ] = 1024 * MIB
    jobs_max_age: Annotated[float, Meta(description="Seconds after which a queued job is dropped.", ge=0)] = (
        0.0
    )
    owner_jobs: Annotated[
        int,
        Meta(
            description="Open jobs of one owner for a model, class and kind; beyond it that owner is "
            "refused. 0: as the stream has it, at first no limit.",
            ge=0,
        ),
    ] = 0
    stream_max_bytes: Annotated[
        int, Meta(description="Room for the chunks of durable jobs; the oldest make room.", ge=MIB)
    ] = 256 * MIB
    stream_max_age: Annotated[float, Meta(description="Seconds that chunks are kept.", ge=1)] = 900.0
    stream_max_chunks: Annotated[int, Meta(description="Chunks kept of one job.", ge=16)] = 65_536
    results_max_bytes: Annotated[int, Meta(description="Room for results.", ge=MIB)] = 1024 * MIB
    results_max_age: Annotated[float, Meta(description="Seconds that results are kept.", ge=1)] = 7 * DAY
    dead_max_bytes: Annotated[int, Meta(description="Room for dead letters.", ge=MIB)] = 256 * MIB
    dead_max_age: Annotated[float, Meta(description="Seconds that dead letters are kept.", ge=0)] = 30 * DAY


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """All of them; printing it hides the secrets."""

    bus: BusSettings = msgspec.field(default_factory=BusSettings)
    worker: WorkerSettings = msgspec.field(default_factory=WorkerSettings)
    streams: StreamSettings = msgspec.field(default_factory=StreamSettings)


class Option(msgspec.Struct, frozen=True, kw_only=True):
    """One setting, for a command line to make an option of.

    Attributes:
        section: Field of `Settings`.
        field: Field of that section.
        name: Key in `resolve`'s flags, and a Python identifier (`nats_url`).
        flag: `--nats-url`.
        env: `INFERBUS_NATS_URL`.
        key: Where it stands in the file (`nats.url`).
        help: One line.
        type: The plain type: str, int, float, bool or Path.
        default: For display; None where there is none to show.
        secret: Not to be shown, and better given by environment or file.
        multiple: May be given several times.
    """

    section: str
    field: str
    name: str
    flag: str
    env: str
    key: str
    help: str
    type: type
    default: Any
    secret: bool
    multiple: bool


_TABLES: Final = {"bus": "nats", "worker": "worker", "streams": "streams"}
_CLASSES: Final[dict[str, type[_Section]]] = {
    "bus": BusSettings,
    "worker": WorkerSettings,
    "streams": StreamSettings,
}


def options(*sections: str) -> tuple[Option, ...]:
    """Every setting of these sections (`bus`, `worker`, `streams`; default all)."""
    return tuple(
        _option(section, field)
        for section in sections or tuple(_TABLES)
        for field in msgspec.structs.fields(_CLASSES[section])
    )


def resolve(
    settings: type[Settings] | Settings,
    flags: Mapping[str, Any],
    env: Mapping[str, str],
    file: Path | None = None,
) -> Settings:
    """All settings from all sources.

    Args:
        settings: `Settings`, or an instance whose values are the defaults.
        flags: Option names to values; None and empty tuples count as not given, other names are ignored.
        env: The environment.
        file: A TOML file.

    Raises:
        ConfigError: Listing everything that is wrong.
    """
    base = settings if isinstance(settings, Settings) else settings()
    problems: list[str] = []
    tables = _read(file, problems)
    sections: dict[str, Any] = {}
    for section, cls in _CLASSES.items():
        given, sources = _collect(section, flags, env, (file, tables), problems)
        whole = msgspec.structs.replace(getattr(base, section), **given)
        for field, message in whole.problems():
            option = _option(section, next(f for f in msgspec.structs.fields(cls) if f.name == field))
            problems.append(f"{option.key} ({sources.get(field, 'default')}): {message}")
        sections[section] = whole
    if problems:
        raise ConfigError(problems)
    return Settings(**sections)


def hide_userinfo(url: str) -> str:
    """A URL without the user name, password or token that may stand in it."""
    head, separator, rest = url.partition("://")
    if not separator:
        head, rest = "", url
    userinfo, at, host = rest.rpartition("@")
    return f"{head}{separator}{HIDDEN if userinfo else ''}{at}{host}"


def _read(file: Path | None, problems: list[str]) -> dict[str, Any]:
    if file is None:
        return {}
    try:
        tables = tomllib.loads(file.read_text())
    except OSError as error:
        problems.append(f"{file}: {error.strerror}")
        return {}
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        problems.append(f"{file}: not valid TOML: {error}")
        return {}
    known = {option.key for option in options()}
    for table, values in tables.items():
        if table not in _TABLES.values() or not isinstance(values, dict):
            problems.append(
                f"{table} (file {file}): no such section; there are {', '.join(_TABLES.values())}"
            )
            continue
        problems.extend(
            f"{table}.{key} (file {file}): no such setting" for key in values if f"{table}.{key}" not in known
        )
    return tables


def _collect(
    section: str,
    flags: Mapping[str, Any],
    env: Mapping[str, str],
    file: tuple[Path | None, Mapping[str, Any]],
    problems: list[str],
) -> tuple[dict[str, Any], dict[str, str]]:
    """The values of one section that some source gives, and which source that was."""
    given: dict[str, Any] = {}
    sources: dict[str, str] = {}
    path, tables = file
    for field in msgspec.structs.fields(_CLASSES[section]):
        option = _option(section, field)
        table, key = option.key.split(".")
        values = tables.get(table)
        if (value := flags.get(option.name)) not in (None, (), []):
            source = f"flag {option.flag}"
        elif value := env.get(option.env):
            source = f"environment {option.env}"
        elif isinstance(values, dict) and key in values:
            value, source = values[key], f"file {path}"
        else:
            continue
        try:
            given[field.name] = _convert(value, _hints(section)[field.name])
        except (msgspec.ValidationError, ValueError) as error:
            # msgspec's texts name types, never values: fit for secrets too.
            problems.append(f"{option.key} ({source}): {str(error)[:1].lower()}{str(error)[1:]}")
            continue
        sources[field.name] = source
        found = given[field.name]
        if _meta(section, field.name).get("file") and isinstance(found, Path) and not found.is_file():
            problems.append(f"{option.key} ({source}): no such file: {found}")
    return given, sources


def _convert(value: Any, hint: Any) -> Any:
    plain = _plain(hint)
    if get_origin(plain) is tuple:
        value = value.split(",") if isinstance(value, str) else value
        value = [part.strip() if isinstance(part, str) else part for part in value]
    elif get_origin(plain) is dict and isinstance(value, str):
        pairs = [part.partition(":") for part in value.split(",") if part.strip()]
        if not all(separator for _, separator, _ in pairs):
            raise ValueError("must be name:weight, separated by commas")
        value = {name.strip(): weight.strip() for name, _, weight in pairs}
    elif plain is Path or Path in get_args(plain):
        return Path(msgspec.convert(str(value), str)).expanduser()
    return msgspec.convert(value, hint, strict=False)


def _option(section: str, field: Any) -> Option:
    table, extra = _TABLES[section], _meta(section, field.name)
    plain = _plain(_hints(section)[field.name])
    name = extra.get("name", field.name.replace("_", "-"))
    full = name if section == "worker" else f"{table}-{name}"
    multiple = get_origin(plain) is tuple
    kinds = [_plain(kind) for kind in get_args(plain) if kind is not type(None)] or [plain]
    kind = str if get_origin(plain) is dict else kinds[0]
    default = field.default if field.default is not msgspec.NODEFAULT else None
    return Option(
        section=section,
        field=field.name,
        name=full.replace("-", "_"),
        flag=f"--{full}",
        env=ENVIRONMENT + full.replace("-", "_").upper(),
        key=f"{table}.{name.replace('-', '_')}",
        help=extra["help"],
        type=kind,
        default=default,
        secret=bool(extra.get("secret")),
        multiple=multiple,
    )


@functools.cache
def _hints(section: str) -> dict[str, Any]:
    return get_type_hints(_CLASSES[section], include_extras=True)


def _plain(hint: Any) -> Any:
    return get_args(hint)[0] if get_origin(hint) is Annotated else hint


def _meta(section: str, field: str) -> dict[str, Any]:
    """A field's help and extras."""
    found: dict[str, Any] = {"help": ""}
    for part in get_args(_hints(section)[field])[1:]:
        if isinstance(part, Meta):
            found |= {"help": part.description or "", **(part.extra or {})}
    return found


def _shown(cls: type[_Section], name: str, value: Any) -> Any:
    section = next(key for key, known in _CLASSES.items() if known is cls)
    if _meta(section, name).get("secret") and value is not None:
        return HIDDEN
    if name == "urls":
        return tuple(hide_userinfo(url) for url in value)
    return str(value) if isinstance(value, Path) else value
