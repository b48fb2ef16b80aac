"""Every setting, with its type, limits, default and help text; read from flags, environment and a TOML file.

A flag wins over the environment, the environment over the file, the file over the default. All problems are
reported together, each with the source of the value. The command line derives its options from `options()`,
so that a setting is defined once, here.

    section in the file   struct            flag              environment
    [nats]                BusSettings       --nats-url        INFERBUS_NATS_URL
    [worker]              WorkerSettings    --slots           INFERBUS_SLOTS
    [streams]             StreamSettings    --streams-…       INFERBUS_STREAMS_…
    [gateway]             GatewaySettings   --gateway-…       INFERBUS_GATEWAY_…
"""

# Why not pydantic-settings: importing it takes 250 to 290 ms, msgspec 50 ms (Python 3.11, one machine), which
# every command and client would pay. Its errors do not say whether a value came from a flag, the environment
# or the file, and the options of the command line would still have to be derived from the fields.

from __future__ import annotations

import difflib
import functools
import ipaddress
import re
import secrets
import tomllib
import types
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Final, Union, get_args, get_origin, get_type_hints
from urllib.parse import urlsplit

import msgspec
from msgspec import Meta

from inferbus.schemas.errors import InferbusError
from inferbus.schemas.subjects import CLASSES, Subjects, escape

ENVIRONMENT: Final = "INFERBUS_"
HIDDEN: Final = "***"
DAY: Final = 24 * 3600.0
MIB: Final = 1024 * 1024

OTHER_VARIABLES: Final = frozenset(
    ENVIRONMENT + name
    for name in (
        "CACHE",
        "CONFIG",
        "CPU",
        "DOCKER_STATE",
        "ENGINE_REPORT",
        "OWNER",
        "STAND_IN",
        "TEST_ENGINES",
        "TEST_NATS_IMAGE",
    )
)
"""Variables that are no settings: of the command line, the demo model, and the tests."""

_SERVICE_VARIABLE: Final = re.compile(r"INFERBUS_(\w+_)?(SERVICE_(HOST|PORT\w*)|PORT_\d+_(TCP|UDP|SCTP)\w*)")
_SERVICE_URL: Final = re.compile(r"(tcp|udp|sctp)://\S+")
_SCHEMES: Final = frozenset({"nats", "tls", "ws", "wss"})
_TOKEN: Final = re.compile(r"[A-Za-z0-9_-]+")


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
    """A group of settings; its representation hides secrets, also those inside URLs."""

    def __repr__(self) -> str:
        section = next(name for name, (_, cls) in _SECTIONS.items() if isinstance(self, cls))
        shown = (f"{each.field}={each.shown(getattr(self, each.field))!r}" for each in options(section))
        return f"{type(self).__name__}({', '.join(shown)})"

    def problems(self) -> Iterator[tuple[str, str]]:
        """What is wrong beyond the type and range of a single field: pairs of field and message."""
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
    tls_first: Annotated[
        bool, Meta(description="Begin with the TLS handshake, for servers with handshake_first.")
    ] = False
    prefix: Annotated[str, Meta(description="First token of every subject.")] = "infer"
    inbox_prefix: Annotated[
        str, Meta(description="Prefix of reply subjects; a private one keeps answers private.")
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
            if not _is_nats_url(url):
                yield (
                    "urls",
                    "must be a nats://, tls://, ws:// or wss:// URL without a query, "
                    f"not {hide_userinfo(url).partition('?')[0]!r}",
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
        int, Meta(description="Most requests held at once; 0: what the engine can run.", ge=0, le=65536)
    ] = 0
    prompt_window: Annotated[
        int,
        Meta(description="Prompt tokens without a first token in the engine; 0: a few steps.", ge=0),
    ] = 0
    live_share: Annotated[
        float, Meta(description="Share of slots and KV tokens that jobs leave to live requests.", ge=0, le=1)
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
    trust_grammars: Annotated[
        bool, Meta(description="Take grammars and stop patterns unchecked: one can stall the engine.")
    ] = False
    verbose: Annotated[
        bool, Meta(description="Log debug events too, such as the traceback of a failed start.")
    ] = False
    metrics_port: Annotated[
        Annotated[int, Meta(ge=0, le=65535)] | None,
        Meta(description="HTTP port of metrics and health checks; 0: a free one; default: none."),
    ] = None
    metrics_host: Annotated[str, Meta(description="Address to serve them on.")] = "0.0.0.0"  # noqa: S104
    pod: Annotated[
        Annotated[str, Meta(pattern="^[a-z0-9][-a-z0-9.]{0,252}$")] | None,
        Meta(description="Kubernetes pod of this worker; its deletion cost follows the busy slots."),
    ] = None
    tracing: Annotated[
        bool, Meta(description="Export OpenTelemetry traces; OTEL_… variables say where to.")
    ] = False

    def problems(self) -> Iterator[tuple[str, str]]:
        """Unknown classes, and reply prefixes that are none."""
        if unknown := sorted(set(self.classes) - set(CLASSES)):
            yield "classes", f"knows {', '.join(CLASSES)}; not {', '.join(unknown)}"
        for prefix in self.reply_prefixes:
            tokens = prefix.removesuffix(".").split(".")
            if not prefix.endswith(".") or not all(_TOKEN.fullmatch(token) for token in tokens):
                yield "reply_prefixes", f"must be plain tokens and end in a dot, not {prefix!r}"
        for field, name in (("worker", self.worker), ("model", self.model)):
            if name is None:
                continue
            if not name.isprintable():
                yield field, "must be printable text"
            try:
                escape(name)
            except InferbusError as error:
                yield field, error.message
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
            "refused. 0: as the stream has it, at first 10,000.",
            ge=0,
        ),
    ] = 0
    stream_max_bytes: Annotated[
        int, Meta(description="Room for the chunks of durable jobs; the oldest make room.", ge=MIB)
    ] = 256 * MIB
    stream_max_age: Annotated[float, Meta(description="Seconds that chunks are kept.", ge=1)] = 900.0
    stream_max_chunks: Annotated[int, Meta(description="Chunks kept of one job.", ge=16)] = 65_536
    results_max_bytes: Annotated[int, Meta(description="Room for results.", ge=MIB)] = 1024 * MIB
    owner_results: Annotated[
        int, Meta(description="Results kept of one owner; beyond it its oldest are removed. 0: all.", ge=0)
    ] = 100_000
    results_max_age: Annotated[float, Meta(description="Seconds that results are kept.", ge=1)] = 7 * DAY
    objects_max_bytes: Annotated[
        int, Meta(description="Room for bodies that are too large for one message.", ge=MIB)
    ] = 1024 * MIB
    files_max_bytes: Annotated[int, Meta(description="Room for the files of shared batches.", ge=MIB)] = (
        1024 * MIB
    )
    dead_max_bytes: Annotated[int, Meta(description="Room for dead letters.", ge=MIB)] = 256 * MIB
    dead_max_age: Annotated[float, Meta(description="Seconds that dead letters are kept.", ge=0)] = 30 * DAY


class GatewaySettings(_Section, frozen=True, kw_only=True):
    """How the HTTP gateway listens, whom it admits, and what it bounds."""

    # Not a host and a port: Kubernetes sets INFERBUS_GATEWAY_PORT for a Service `inferbus-gateway`.
    listen: Annotated[str, Meta(description="Address and port of the HTTP gateway; port 0: a free one.")] = (
        "127.0.0.1:8000"
    )
    open: Annotated[
        bool,
        Meta(description="Listen on any address without API keys: who can reach it is bounded elsewhere."),
    ] = False
    keys_file: Annotated[Path | None, _file("TOML file with API keys, their owners and limits.")] = None
    keys: Annotated[dict[str, str], _secret("API keys with their owners, as key:owner,key:owner.")] = {}
    stored_keys: Annotated[bool, Meta(description="Admit the API keys of `inferbus keys`, in NATS, too.")] = (
        False
    )
    requests_per_minute: Annotated[
        int,
        Meta(description="Requests a minute for each API key that sets no limit of its own; 0: any.", ge=0),
    ] = 0
    concurrency: Annotated[
        int, Meta(description="Open requests of each API key that sets no limit of its own; 0: any.", ge=0)
    ] = 0
    max_body: Annotated[int, Meta(description="Largest body of a request in bytes.", ge=1024)] = 32 * MIB
    max_file: Annotated[int, Meta(description="Largest uploaded file in bytes.", ge=1024)] = 200 * MIB
    keep_alive: Annotated[
        float, Meta(description="Seconds of silence after which a stream gets a comment.", ge=0.1)
    ] = 10.0
    grace: Annotated[float, Meta(description="Seconds for open requests to finish after SIGTERM.", ge=0)] = (
        60.0
    )

    @property
    def address(self) -> tuple[str, int]:
        """Host and port to listen on."""
        host, _, port = self.listen.rpartition(":")
        return host.strip("[]"), int(port)

    @property
    def has_keys(self) -> bool:
        """Whether an API key is needed."""
        return bool(self.keys) or self.keys_file is not None or self.stored_keys

    @property
    def loopback(self) -> bool:
        """Whether only this machine can reach it."""
        host, _ = self.address
        try:
            return ipaddress.ip_address(host).is_loopback
        except ValueError:
            return host == "localhost"

    def problems(self) -> Iterator[tuple[str, str]]:
        """An address that is none, and one that others can reach without keys."""
        host, _, port = self.listen.rpartition(":")
        if not host or not port.isascii() or not port.isdigit() or int(port) > 65535:
            yield "listen", f"must be host:port, not {self.listen!r}"
        elif not (self.loopback or self.open or self.has_keys):
            yield "listen", "must be a loopback address where no API keys are set"


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """All of them; printing it hides the secrets."""

    bus: BusSettings = msgspec.field(default_factory=BusSettings)
    worker: WorkerSettings = msgspec.field(default_factory=WorkerSettings)
    streams: StreamSettings = msgspec.field(default_factory=StreamSettings)
    gateway: GatewaySettings = msgspec.field(default_factory=GatewaySettings)


class Option(msgspec.Struct, frozen=True, kw_only=True):
    """One setting, as the command line and the documentation need it.

    Attributes:
        section: Field of `Settings`.
        field: Field of that section.
        name: Key in `resolve`'s flags, and a Python identifier (`nats_url`).
        flag: `--nats-url`.
        env: `INFERBUS_NATS_URL`.
        key: Place in the file (`nats.url`).
        help: One line.
        type: The plain type: str, int, float, bool or Path.
        default: For display; None where there is none to show.
        secret: Not to be shown, and better given by environment or file.
        multiple: May be given several times.
        file: Names a file that has to exist.
        hint: The annotation of the field, with its limits.
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
    file: bool
    hint: Any

    def shown(self, value: Any) -> Any:
        """A value as it may be displayed: secrets are hidden."""
        if self.secret and value not in (None, {}):
            return HIDDEN
        if self.field == "urls":
            return tuple(hide_userinfo(url) for url in value)
        return str(value) if isinstance(value, Path) else value


_SECTIONS: Final[dict[str, tuple[str, type[_Section]]]] = {
    "bus": ("nats", BusSettings),
    "worker": ("worker", WorkerSettings),
    "streams": ("streams", StreamSettings),
    "gateway": ("gateway", GatewaySettings),
}
"""Field of `Settings`: name of the table in the file, and class."""


@functools.cache
def options(*sections: str) -> tuple[Option, ...]:
    """Every setting of these sections (`bus`, `worker`, `streams`, `gateway`; default all)."""
    return tuple(
        _option(section, field)
        for section in sections or _SECTIONS
        for field in msgspec.structs.fields(_SECTIONS[section][1])
    )


def resolve(flags: Mapping[str, Any], env: Mapping[str, str], file: Path | None = None) -> Settings:
    """The settings from all sources.

    Args:
        flags: Option names to values; None and empty tuples count as not given, other names are ignored.
        env: The environment.
        file: A TOML file.

    Raises:
        ConfigError: Listing everything that is wrong.
    """
    problems: list[str] = []
    tables = _read(file, problems)
    sections: dict[str, Any] = {}
    for section, (_, cls) in _SECTIONS.items():
        values: dict[str, Any] = {}
        sources: dict[str, str] = {}
        for option in options(section):
            if (value := flags.get(option.name)) not in (None, (), []):
                source = f"flag {option.flag}"
            elif value := env.get(option.env):
                source = f"environment {option.env}"
            elif option.key in tables:
                value, source = tables[option.key], f"file {file}"
            else:
                continue
            sources[option.field] = source
            try:
                values[option.field] = _convert(value, option)
            except (msgspec.ValidationError, ValueError) as error:
                # The messages of msgspec name types, never values, so secrets are safe.
                problem = f"{str(error)[:1].lower()}{str(error)[1:]}"
                if source == f"environment {option.env}" and _SERVICE_URL.fullmatch(value):
                    problem = _service_problem(option, value)
                problems.append(f"{option.key} ({source}): {problem}")
        sections[section] = settings = cls(**values)
        keys = {option.field: option.key for option in options(section)}
        for field, message in settings.problems():
            problems.append(f"{keys[field]} ({sources.get(field, 'default')}): {message}")
    if problems:
        raise ConfigError(problems)
    return Settings(**sections)


def unknown_variables(env: Mapping[str, str]) -> list[str]:
    """One line for each variable `INFERBUS_…` that nothing reads.

    Those that Kubernetes sets for a Service whose name begins with "inferbus" are left out.
    """
    known = {option.env for option in options()} | OTHER_VARIABLES
    lines = []
    for name in sorted(env):
        if name.startswith(ENVIRONMENT) and name not in known and not _by_kubernetes(name, env[name]):
            close = difflib.get_close_matches(name, known, n=1, cutoff=0.85)
            lines.append(f"unknown variable {name}" + (f"; did you mean {close[0]}?" if close else ""))
    return lines


def hide_userinfo(url: str) -> str:
    """A URL without the user name, password or token that may stand in it."""
    head, separator, rest = url.partition("://")
    if not separator:
        head, rest = "", url
    userinfo, at, host = rest.rpartition("@")
    return f"{head}{separator}{HIDDEN if userinfo else ''}{at}{host}"


def _by_kubernetes(name: str, value: str) -> bool:
    """Whether Kubernetes sets this in every container, for a Service whose name begins with "inferbus"."""
    return bool(_SERVICE_VARIABLE.fullmatch(name) or _SERVICE_URL.fullmatch(value))


def _service_problem(option: Option, value: str) -> str:
    name = option.env.removesuffix("_PORT").lower().replace("_", "-")
    return (
        f"{value} was set by Kubernetes for the Service {name}: rename that Service, or set "
        "enableServiceLinks: false in the pod's spec"
    )


def _is_nats_url(url: str) -> bool:
    try:
        parts = urlsplit(url if "://" in url else f"nats://{url}")
        # A password in a query would not be one, and would be shown.
        usable = bool(parts.hostname) and parts.port != 0 and not parts.query
        return parts.scheme in _SCHEMES and usable
    except ValueError:
        return False


def _read(file: Path | None, problems: list[str]) -> dict[str, Any]:
    """The values in a file by their keys (`nats.url`)."""
    if file is None:
        return {}
    try:
        # Editors on Windows begin a file with a byte order mark.
        tables = tomllib.loads(file.read_text(encoding="utf-8-sig"))
    except OSError as error:
        problems.append(f"{file}: {error.strerror}")
        return {}
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        problems.append(f"{file}: not valid TOML: {error}")
        return {}
    known = {table for table, _ in _SECTIONS.values()}
    for table in [name for name in tables if name not in known or not isinstance(tables[name], dict)]:
        problems.append(f"{table} (file {file}): no such section; there are {', '.join(sorted(known))}")
        del tables[table]
    values = {f"{table}.{key}": value for table, content in tables.items() for key, value in content.items()}
    known_keys = {option.key for option in options()}
    problems.extend(f"{key} (file {file}): no such setting" for key in values if key not in known_keys)
    return values


def _convert(value: Any, option: Option) -> Any:
    for text in value if isinstance(value, list | tuple) else (value,):
        if isinstance(text, str) and not _is_unicode(text):
            raise ValueError("must be UTF-8 text")
    if option.type is Path:
        path = Path(msgspec.convert(str(value), str)).expanduser()
        if option.file and not path.is_file():
            raise ValueError(f"no such file: {path}")
        return path
    if isinstance(value, str) and option.multiple:
        value = [part.strip() for part in value.split(",")]
    elif isinstance(value, str) and get_origin(_plain(option.hint)) is dict:
        pairs = [part.partition(":") for part in value.split(",") if part.strip()]
        if not all(separator for _, separator, _ in pairs):
            raise ValueError("must be name:weight, separated by commas")
        value = {name.strip(): weight.strip() for name, _, weight in pairs}
    return msgspec.convert(value, option.hint, strict=False)


def _is_unicode(text: str) -> bool:
    """False where bytes of an argument or variable were no text."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _option(section: str, field: msgspec.structs.FieldInfo) -> Option:
    table, cls = _SECTIONS[section]
    hint = get_type_hints(cls, include_extras=True)[field.name]
    plain, meta = _plain(hint), get_args(hint)[1]
    extra = meta.extra or {}
    name = extra.get("name", field.name.replace("_", "-"))
    full = name if section == "worker" else f"{table}-{name}"
    return Option(
        section=section,
        field=field.name,
        name=full.replace("-", "_"),
        flag=f"--{full}",
        env=ENVIRONMENT + full.replace("-", "_").upper(),
        key=f"{table}.{name.replace('-', '_')}",
        help=meta.description or "",
        type=_scalar(plain),
        default=None if field.default is msgspec.NODEFAULT else field.default,
        secret=bool(extra.get("secret")),
        multiple=get_origin(plain) is tuple,
        file=bool(extra.get("file")),
        hint=hint,
    )


def _plain(hint: Any) -> Any:
    return get_args(hint)[0]


def _scalar(hint: Any) -> type:
    """The type of one value on the command line: int for `Annotated[int, …] | None`, str for a dictionary."""
    origin = get_origin(hint)
    if origin is dict:
        return str
    if origin in (Annotated, tuple, Union, types.UnionType):
        return _scalar(get_args(hint)[0])
    plain: type = hint
    return plain
