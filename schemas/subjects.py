"""Every subject of the contract: built here, parsed here, checked here.

A model name, an owner and a job id each fill one token of a subject. `escape`
makes any text a legal token, reversibly: letters, digits, `_` and `-` stay,
every other byte of its UTF-8 becomes `=XX`. The result is also a legal KV key
and a legal consumer name.
"""

from __future__ import annotations

import re
from typing import Final, Literal, get_args

import msgspec

from inferbus.schemas import limits
from inferbus.schemas.errors import InvalidReplySubject, InvalidSubject

GeneratedKind = Literal["tokens", "chat", "completions"]
"""Requests whose answer is generated token by token, and may be streamed."""

ComputedKind = Literal["embeddings", "tokenize", "detokenize"]
"""Requests whose answer is computed at once and comes in one piece."""

Kind = GeneratedKind | ComputedKind
GENERATED: Final[tuple[GeneratedKind, ...]] = get_args(GeneratedKind)
COMPUTED: Final[tuple[ComputedKind, ...]] = get_args(ComputedKind)
KINDS: Final[tuple[Kind, ...]] = (*GENERATED, *COMPUTED)

AnyKind = Kind | Literal["unknown"]
UNKNOWN: Final[Literal["unknown"]] = "unknown"
"""Stands for a kind that is none of the contract, in answers, dead letters and figures."""

JobClass = Literal["interactive", "batch"]
CLASSES: Final[tuple[JobClass, ...]] = get_args(JobClass)

LIVE_OWNER: Final = "live"
"""The owner token of live requests, in cancel subjects; no durable job may use it."""

_SAFE: Final = frozenset(b"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-")
_TOKEN: Final = re.compile(r"(?:[A-Za-z0-9_-]|=[0-9A-F]{2})+")
_PLAIN: Final = re.compile(r"[A-Za-z0-9_-]+")
PUBLISHABLE: Final = re.compile(r"[!-)+,\-/-=?-~]+(?:\.[!-)+,\-/-=?-~]+)*")
"""A subject that can be published to: printable ASCII tokens without `*` and `>`."""


def escape(name: str) -> str:
    """A name as one token of a subject.

    Raises:
        InvalidSubject: Empty, not Unicode, or longer than `limits.SUBJECT_TOKEN_BYTES`.
    """
    if not name:
        raise InvalidSubject("a model name, owner or job id must not be empty")
    try:
        raw = name.encode()
    except UnicodeEncodeError:
        raise InvalidSubject("a model name, owner or job id must be valid Unicode") from None
    if len(raw) > limits.SUBJECT_TOKEN_BYTES:
        raise InvalidSubject(f"a model name, owner or job id has at most {limits.SUBJECT_TOKEN_BYTES} bytes")
    if _PLAIN.fullmatch(name):
        return name
    return "".join(chr(byte) if byte in _SAFE else f"={byte:02X}" for byte in raw)


def unescape(token: str) -> str:
    """The name that `escape` made a token of.

    Raises:
        InvalidSubject: `escape` never makes such a token.
    """
    if not _TOKEN.fullmatch(token):
        raise InvalidSubject("a subject token is not in escaped form")
    if _PLAIN.fullmatch(token):
        return escape(token)
    try:
        name = re.sub(rb"=([0-9A-F]{2})", lambda m: bytes([int(m[1], 16)]), token.encode()).decode()
    except UnicodeDecodeError:
        raise InvalidSubject("a subject token is not in escaped form") from None
    if escape(name) != token:
        raise InvalidSubject("a subject token is not in escaped form")
    return name


class RequestAddress(msgspec.Struct, frozen=True):
    """What the subject of a live request says."""

    model: str
    kind: AnyKind


class JobAddress(msgspec.Struct, frozen=True):
    """What the subject of a durable job says."""

    model: str
    job_class: JobClass
    owner: str
    kind: AnyKind


class JobKey(msgspec.Struct, frozen=True):
    """One job of one owner, as named by cancel, stream and result subjects."""

    owner: str
    job: str


class Subjects(msgspec.Struct, frozen=True):
    """The subjects under one prefix (default `infer`)."""

    prefix: str = "infer"

    def __post_init__(self) -> None:
        if len(self.prefix) > limits.PREFIX_CHARS or not all(
            _PLAIN.fullmatch(token) for token in self.prefix.split(".")
        ):
            raise InvalidSubject(
                f"the subject prefix must be tokens of letters, digits, '_' and '-', "
                f"at most {limits.PREFIX_CHARS} characters"
            )

    def request(self, model: str, kind: Kind) -> str:
        """A live request."""
        return f"{self.prefix}.request.{escape(model)}.{_kind(kind)}"

    def requests_of(self, model: str) -> str:
        """Filter: all live requests of one model."""
        return f"{self.prefix}.request.{escape(model)}.*"

    def passed(self, model: str, worker: str, kind: str) -> str:
        """A live request that another worker passed on to this one; or a filter, by `*` for the kind."""
        return f"{self.prefix}.passed.{escape(model)}.{escape(worker)}.{kind if kind == '*' else _kind(kind)}"

    def job(self, model: str, job_class: JobClass, owner: str, kind: Kind) -> str:
        """A durable job."""
        return f"{self.prefix}.jobs.{escape(model)}.{_class(job_class)}.{_owner(owner)}.{_kind(kind)}"

    def jobs_of_owner(self, owner: str) -> str:
        """Filter: all durable jobs of one owner."""
        return f"{self.prefix}.jobs.*.*.{_owner(owner)}.*"

    def jobs_of(self, model: str, job_class: JobClass) -> str:
        """Filter: all durable jobs of one model and class."""
        return f"{self.prefix}.jobs.{escape(model)}.{_class(job_class)}.*.*"

    def jobs_captured(self, model: str) -> list[str]:
        """Filters: the durable jobs of one model, those of known classes and kinds only."""
        base = f"{self.prefix}.jobs.{escape(model)}"
        return [f"{base}.{job_class}.*.{kind}" for job_class in CLASSES for kind in KINDS]

    def prefill(self, model: str, worker: str | None = None) -> str:
        """A hand-off to any prefill worker of a model, or to one of them."""
        base = f"{self.prefix}.prefill.{escape(model)}"
        return base if worker is None else f"{base}.{escape(worker)}"

    def worker(self, worker: str, incarnation: str) -> str:
        """Subscribed to by one process of a worker: whether somebody listens tells whether it lives."""
        return f"{self.prefix}.worker.{escape(worker)}.{escape(incarnation)}"

    def cancel(self, owner: str, job: str) -> str:
        """A cancellation."""
        return f"{self.prefix}.cancel.{escape(owner)}.{escape(job)}"

    def alive(self, owner: str, job: str) -> str:
        """The question whether anybody works on a job; whoever does answers, and nobody else."""
        return f"{self.prefix}.alive.{escape(owner)}.{escape(job)}"

    def read(self, owner: str, job: str) -> str:
        """A request for what is stored of a job; a worker answers it."""
        return f"{self.prefix}.read.{escape(owner)}.{escape(job)}"

    def remove(self, owner: str, name: str) -> str:
        """A request to remove what is stored of a job or batch; a worker answers it."""
        return f"{self.prefix}.remove.{escape(owner)}.{escape(name)}"

    def stream(self, owner: str, job: str) -> str:
        """The chunks of a durable job."""
        return f"{self.prefix}.stream.{escape(owner)}.{escape(job)}"

    def attempts(self, owner: str, job: str, submission: int) -> str:
        """The count of last attempts at one submission of a durable job."""
        return f"{self.prefix}.attempts.{escape(owner)}.{escape(job)}.{submission}"

    def attempts_of(self, owner: str) -> str:
        """Filter: the counts of attempts at all durable jobs of one owner."""
        return f"{self.prefix}.attempts.{escape(owner)}.*.*"

    def result(self, owner: str, job: str) -> str:
        """The final result of a durable job."""
        return f"{self.prefix}.results.{escape(owner)}.{escape(job)}"

    def results_of(self, owner: str) -> str:
        """Filter: the results of all durable jobs of one owner."""
        return f"{self.prefix}.results.{escape(owner)}.*"

    def object(self, owner: str, object_id: str, part: int | str) -> str:
        """A part of a body that is too large for one message, counted from 0; or a filter, by `*`."""
        return f"{self.prefix}.objects.{escape(owner)}.{escape(object_id)}.{part}"

    def file(self, owner: str, batch: str, name: str, offset: int) -> str:
        """A segment of a file of a shared batch."""
        return f"{self.prefix}.files.{escape(owner)}.{escape(batch)}.{escape(name)}.{offset}"

    def files_of(self, owner: str, batch: str) -> str:
        """Filter: all files of a batch."""
        return f"{self.prefix}.files.{escape(owner)}.{escape(batch)}.>"

    def files_about(self, owner: str) -> str:
        """Filter: what is said of each uploaded file of an owner."""
        return f"{self.prefix}.files.{escape(owner)}.*.about.0"

    def dead(self, model: str, kind: AnyKind) -> str:
        """A job that will not be tried again."""
        return f"{self.prefix}.dead.{escape(model)}.{UNKNOWN if kind == UNKNOWN else _kind(kind)}"

    def all(
        self,
        family: Literal[
            "jobs",
            "stream",
            "results",
            "attempts",
            "cancel",
            "alive",
            "read",
            "remove",
            "dead",
            "objects",
            "files",
        ],
    ) -> str:
        """Filter: everything of one family."""
        return f"{self.prefix}.{family}.>"

    def parse_request(self, subject: str, *, any_kind: bool = False) -> RequestAddress:
        """The address in a live request's subject.

        Args:
            subject: As received.
            any_kind: An unknown kind is `UNKNOWN` instead of an error.

        Raises:
            InvalidSubject: Not such a subject.
        """
        model, kind = self._tokens(subject, "request", 2)
        return RequestAddress(unescape(model), _parsed_kind(kind, any_kind))

    def parse_passed(self, subject: str) -> RequestAddress:
        """The address in the subject of a live request that was passed on.

        Raises:
            InvalidSubject: Not such a subject.
        """
        model, _, kind = self._tokens(subject, "passed", 3)
        return RequestAddress(unescape(model), _kind(kind))

    def parse_job(self, subject: str, *, any_kind: bool = False) -> JobAddress:
        """The address in a durable job's subject.

        Args:
            subject: As stored.
            any_kind: An unknown kind is `UNKNOWN` instead of an error.

        Raises:
            InvalidSubject: Not such a subject.
        """
        model, job_class, owner, kind = self._tokens(subject, "jobs", 4)
        name = unescape(owner)
        _owner(name)
        return JobAddress(unescape(model), _class(job_class), name, _parsed_kind(kind, any_kind))

    def model_of(self, subject: str) -> str:
        """The model in the subject of a job whatever else it holds; `UNKNOWN` where none can be read."""
        token, _, _ = subject.removeprefix(f"{self.prefix}.jobs.").partition(".")
        try:
            return unescape(token)
        except InvalidSubject:
            return UNKNOWN

    def parse_key(
        self, subject: str, family: Literal["stream", "results", "cancel", "alive", "read", "remove"]
    ) -> JobKey:
        """The owner and job in a subject of one of these families.

        Raises:
            InvalidSubject: Not such a subject.
        """
        owner, job = self._tokens(subject, family, 2)
        return JobKey(unescape(owner), unescape(job))

    @property
    def worker_inboxes(self) -> str:
        """Prefix of the inboxes of workers, which no client may publish to."""
        return f"{self.prefix}.inbox"

    def check_reply(self, subject: str, *, owner: str, prefixes: tuple[str, ...] = ("_INBOX.",)) -> str:
        """A reply subject that a worker may publish to for this owner, unchanged.

        A worker has more rights than its callers, so it must not be talked into using them: only
        inboxes (`prefixes`) and the owner's own stream subjects are allowed; never a worker's inbox.

        Raises:
            InvalidReplySubject: Anything else: wildcards, empty tokens, `$`, control characters,
                other subjects, too long.
        """
        own = f"{self.prefix}.stream.{escape(owner)}."
        tokens = subject.split(".")
        allowed = (
            len(subject) <= limits.SUBJECT_CHARS
            and PUBLISHABLE.fullmatch(subject) is not None
            and not any(token.startswith("$") for token in tokens)
            and (
                (not subject.startswith(f"{self.prefix}.") and any(map(subject.startswith, prefixes)))
                or (subject.startswith(own) and _TOKEN.fullmatch(subject[len(own) :]) is not None)
            )
        )
        if not allowed:
            raise InvalidReplySubject(
                "replies go to an inbox or to the owner's own stream subject only", param="Infer-Reply-To"
            )
        return subject

    def check_handoff_reply(self, subject: str, *, prefixes: tuple[str, ...]) -> str:
        """A reply subject that a prefill worker may publish to for a decode worker, unchanged.

        Raises:
            InvalidReplySubject: Neither a worker's inbox nor one under `prefixes`, where workers of older
                versions have theirs.
        """
        if subject.startswith(f"{self.worker_inboxes}.") and PUBLISHABLE.fullmatch(subject):
            return subject
        return self.check_reply(subject, owner=LIVE_OWNER, prefixes=prefixes)

    def _tokens(self, subject: str, family: str, count: int) -> list[str]:
        start = f"{self.prefix}.{family}."
        tokens = subject[len(start) :].split(".") if subject.startswith(start) else []
        if len(tokens) != count:
            raise InvalidSubject(f"not a subject of the family {self.prefix}.{family}")
        return tokens


def _owner(name: str) -> str:
    if name == LIVE_OWNER:
        raise InvalidSubject(f"the owner {LIVE_OWNER!r} is reserved for live requests")
    return escape(name)


def _class(token: str) -> JobClass:
    for job_class in CLASSES:
        if token == job_class:
            return job_class
    raise InvalidSubject(f"a job's class is one of {', '.join(CLASSES)}")


def _parsed_kind(token: str, any_kind: bool) -> AnyKind:
    return _kind(token) if token in KINDS or not any_kind else UNKNOWN


def _kind(token: str) -> Kind:
    for kind in KINDS:
        if token == kind:
            return kind
    raise InvalidSubject(f"a subject's kind is one of {', '.join(KINDS)}")
