"""Every decoder, each as a function of one input; it ends in a value or in an error of the tree."""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final

import msgspec

from inferbus.schemas import codec, handoff, headers, kinds, requests
from inferbus.schemas.answers import TokenAnswer, TokenChunk
from inferbus.schemas.errors import InferbusError
from inferbus.schemas.fleet import Capacity, Load, Signature, WorkerInfo
from inferbus.schemas.sampling import NAMES as SAMPLING_NAMES
from inferbus.schemas.subjects import KINDS, Kind, Subjects
from inferbus.workers.bus.connection.frames import check_subject, header_block
from inferbus.workers.bus.fleet.registry import parse_entry
from inferbus.workers.bus.interface import Stored
from inferbus.workers.client import keys
from inferbus.workers.client.messages import parse_message, parse_result
from inferbus.workers.jobs import attempt, cancel, fields, history
from tests.fuzz import wire
from tests.fuzz.mutator import Mutator

NOW: Final = dt.datetime(2026, 1, 1, tzinfo=dt.UTC)
SUBJECTS: Final = Subjects()
TYPES: Final = (codec.JSON, codec.MSGPACK)

REQUESTS: Final[dict[Kind, list[dict[str, Any]]]] = {
    "tokens": [
        {"token_ids": [1, 2, 3], "max_tokens": 8, "n": 2, "logprobs": True, "top_logprobs": 2},
        {"token_ids": [1], "sampling_params": {"stop": ["a"], "logit_bias": {"5": 1.5}, "seed": 1}},
        {"token_ids": [1], "stop_conditions": {"stop_token_ids_hidden": [2]}, "sampling_options": {"n": 1}},
    ],
    "chat": [
        {
            "messages": [{"role": "user", "content": "hi"}],
            "stream": True,
            "stream_options": {"include_usage": True},
        },
        {
            "messages": [
                {
                    "role": "assistant",
                    "tool_calls": [{"id": "t", "function": {"name": "f", "arguments": "{}"}}],
                },
                {"role": "user", "content": [{"type": "text", "text": "hi"}]},
            ],
            "tools": [{"type": "function", "function": {"name": "f"}}],
            "response_format": {"type": "json_object"},
        },
    ],
    "completions": [
        {"prompt": "hi", "temperature": 0.5, "top_p": 1, "logprobs": 1},
        {"prompt": [[1, 2, 3]], "stop": "x", "user": "u", "priority": 1},
    ],
    "embeddings": [
        {"input": "hi", "encoding_format": "base64", "dimensions": 4, "priority": 1},
        {"input": [[1, 2], [3]], "user": "u"},
        {"input": ["a", "b"]},
    ],
    "tokenize": [
        {"prompt": ["a", "b"], "add_special_tokens": False},
        {"messages": [{"role": "user", "content": "hi"}], "add_generation_prompt": True, "tools": []},
    ],
    "detokenize": [{"tokens": [1, 2], "skip_special_tokens": False}, {"tokens": [[1], [2, 3]]}],
}
USAGE: Final = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
ERROR: Final = {"code": "overloaded", "message": "full", "retryable": True}
SIGNATURE: Final = Signature(
    model="m",
    dtype="f",
    kv_dtype="f",
    page_size=1,
    layers=2,
    kv_heads=1,
    head_dim=4,
    tp=1,
    dp=1,
    pp=1,
    backend="b",
)
CAPACITY: Final = Capacity(
    context_length=9, kv_tokens=9, page_size=1, max_running=1, max_prefill_tokens=9, vocabulary=9
)
ANSWERS: Final = [
    {
        "job": "j",
        "attempt": 1,
        "object": "list",
        "model": "m",
        "data": [{"object": "embedding", "index": 0, "embedding": [0.5]}],
        "usage": USAGE,
    },
    {"job": "j", "attempt": 1, "tokens": [1], "count": 1, "max_model_len": 9},
    {"job": "j", "attempt": 1, "text": "a"},
    {
        "job": "j",
        "attempt": 1,
        "seq": 0,
        "index": 0,
        "token_ids": [1],
        "logprobs": {"logprobs": [0.5], "top": [[[1, 2]]]},
    },
    {
        "job": "j",
        "attempt": 1,
        "choices": [{"index": 0, "token_ids": [1], "finish_reason": "stop"}],
        "usage": USAGE,
    },
    {
        "job": "j",
        "attempt": 2,
        "seq": 1,
        "token_ids": [3],
        "object": "chat.completion.chunk",
        "choices": [{"index": 0, "delta": {"role": "assistant", "content": "a"}, "finish_reason": None}],
    },
    {
        "job": "j",
        "attempt": 1,
        "object": "chat.completion",
        "choices": [{"index": 0, "message": {"content": "a"}}],
    },
    {"job": "j", "attempt": 1, "seq": 2, "object": "text_completion", "choices": [{"index": 0, "text": "a"}]},
    {"job": "j", "attempt": 1, "error": ERROR},
    {"job": "j", "attempt": 1, "retrying": ERROR},
]
TO_PREFILL: Final = [
    msgspec.to_builtins(message)
    for message in (
        handoff.Prefill(
            rid="0" * 32,
            room=1,
            token_ids=[1, 2],
            sampling={"n": 1},
            options={"priority": 1},
            worker="w",
            job="j",
            signature=SIGNATURE,
            timeout=5.0,
        ),
        handoff.Abort(rid="0" * 32),
    )
]
FROM_PREFILL: Final = [
    {"type": "queued", "worker": "w"},
    {"type": "accepted", "worker": "w"},
    {"type": "refused", "worker": "w", "error": ERROR},
    {"type": "failed", "worker": "w", "error": ERROR},
    {"type": "done", "worker": "w", "cached_tokens": 1, "transfer": {"seconds": 0.5, "bytes": 9}},
]
API_KEYS: Final[list[Any]] = [
    {
        "owner": "acme",
        "sha256": "0123456789abcdef" * 4,
        "created": "2026-01-01T00:00:00Z",
        "requests_per_minute": 60,
        "concurrency": 4,
    }
]

ANNOUNCEMENTS: Final = [
    msgspec.to_builtins(
        WorkerInfo(
            worker="w",
            role="decode",
            state="ready",
            model="m",
            kinds=["chat"],
            tokenizer=True,
            engine="e",
            version="1",
            host="h",
            started=1.0,
            load=Load(slots=1),
            capacity=CAPACITY,
            signature=SIGNATURE,
        )
    )
]
HEADERS: Final = [
    headers.CONTENT_TYPE,
    headers.JOB_ID,
    headers.MSG_ID,
    headers.REPLY_TO,
    headers.DEADLINE,
    headers.STATUS,
    headers.CHUNKS,
    headers.ATTEMPT,
    headers.SUBMISSION,
    headers.CONTINUES,
    "Status",
    "Nats-Stream",
    "X y",
]
VALUES: Final = [
    "application/msgpack",
    "ok",
    "1",
    "7",
    "1:2",
    "2026-01-01T00:00:00Z",
    "30",
    "_INBOX.a",
    "503",
]
LIVE: Final = [SUBJECTS.request("m", kind) for kind in KINDS]
JOBS: Final = [
    SUBJECTS.job("m", "batch", "acme", "tokens"),
    SUBJECTS.job("m", "interactive", "b.c", "tokens"),
]
INBOXES: Final = ["_INBOX.a.b", "_INBOX.a", SUBJECTS.stream("live", "j")]
ADDRESSES: Final = [
    *LIVE,
    *JOBS,
    *INBOXES,
    SUBJECTS.cancel("acme", "j.1"),
    SUBJECTS.stream("acme", "j"),
    SUBJECTS.result("acme", "j"),
    SUBJECTS.alive("live", "j"),
]
NAMES: Final = [
    *requests.NESTED_SAMPLING,
    *sorted(SAMPLING_NAMES),
    "attempt",
    "seq",
    "choices",
    "error",
    "object",
    "delta",
]

Target = Callable[[Mutator], object]


def _stored(make: Mutator, body: bytes = b"", subject: str = "infer.stream.acme.j") -> Stored:
    found = make.headers(HEADERS, VALUES)
    if make.random.random() < 0.5:
        found[headers.SUBMISSION] = "7"
    return Stored(subject=subject, data=body, headers=found, sequence=7, time=NOW)


def _request(kind: Kind, content_type: str) -> Target:
    def read(make: Mutator) -> object:
        return kinds.read(kind, make.body(REQUESTS[kind], content_type), content_type=content_type, model="m")

    return read


def _typed(kind: Any, values: list[Any]) -> Target:
    def read(make: Mutator) -> object:
        return codec.decode(make.body(values, codec.MSGPACK), kind, codec.MSGPACK)

    return read


def _announcement(make: Mutator) -> object:
    return parse_entry(_stored(make, make.body(ANNOUNCEMENTS, codec.JSON), "$KV.INFER_WORKERS.m.w"))


def _api_key(make: Mutator) -> object:
    return keys.parse_entry(make.subject(LIVE).rsplit(".", 1)[-1], make.body(API_KEYS, codec.JSON))


def _live_request(make: Mutator) -> object:
    return attempt.live(
        _stored(make, subject=make.subject(LIVE)),
        reply=make.subject(INBOXES),
        fallback_id="f",
        subjects=SUBJECTS,
        replies=("_INBOX.",),
    )


def _job(make: Mutator) -> object:
    """A job with its subject, headers and body."""
    message = _stored(make, make.body(REQUESTS["tokens"], codec.JSON), make.subject(JOBS))
    buried = attempt.unaddressed(message, number=1, subjects=SUBJECTS)
    SUBJECTS.dead(buried.model, buried.kind)
    envelope = attempt.durable(message, number=1, subjects=SUBJECTS, replies=("_INBOX.",))
    with suppress(InferbusError):
        check_subject(SUBJECTS.check_reply(make.subject(ADDRESSES), owner="acme"))
    return envelope.read()


def _subjects(make: Mutator) -> object:
    subject = make.subject(ADDRESSES)
    parsers: tuple[Callable[[], object], ...] = (
        lambda: SUBJECTS.parse_request(subject),
        lambda: SUBJECTS.parse_job(subject, any_kind=True),
        lambda: SUBJECTS.parse_key(subject, "cancel"),
        lambda: SUBJECTS.parse_key(subject, "results"),
        # What a worker may publish to, it can publish to.
        lambda: check_subject(SUBJECTS.check_reply(subject, owner="acme")),
    )
    for parse in parsers:
        with suppress(InferbusError):
            parse()
    return SUBJECTS.model_of(subject)


def _answer(make: Mutator) -> object:
    return parse_message(make.body(ANSWERS, make.random.choice(TYPES)), make.headers(HEADERS, VALUES))


def _end_mark(make: Mutator) -> object:
    return parse_message(b"", make.headers(HEADERS, VALUES))


def _result(make: Mutator) -> object:
    return parse_result(make.body(ANSWERS, make.random.choice(TYPES)), make.headers(HEADERS, VALUES))


def _stored_chunks(make: Mutator) -> object:
    stored = [_stored(make, make.body(ANSWERS, make.random.choice(TYPES))) for _ in range(3)]
    return history.resume_points(stored, submission=7, before=make.random.choice((2, 3, 10**9)))


def _cancel_mark(make: Mutator) -> object:
    mark = _stored(make, subject=make.subject(ADDRESSES))
    cancel.hits(mark, submission=7, stored=NOW)
    return SUBJECTS.parse_key(mark.subject, "cancel")


def _dead_letter(make: Mutator) -> object:
    """What of a job's headers goes into its letter can be published, and is printable."""
    found = make.headers(HEADERS, VALUES) | {make.text(): make.text()}
    letter = fields.publishable(fields.without_nats(found))
    assert all(text.isprintable() or text >= "\xa0" for text in letter.values())
    return header_block(letter)


def _connection(make: Mutator) -> None:
    wire.run(wire.mutated(make.random))


TARGETS: Final[dict[str, Target]] = {
    "connection": _connection,
    **{f"request {kind} {name.rpartition('/')[2]}": _request(kind, name) for kind in KINDS for name in TYPES},
    "live request": _live_request,
    "job": _job,
    "subjects": _subjects,
    "hand-off": _typed(handoff.ToPrefill, TO_PREFILL),
    "hand-off answer": _typed(handoff.FromPrefill, FROM_PREFILL),
    "announcement": _announcement,
    "api key": _api_key,
    "answer": _answer,
    "end mark": _end_mark,
    "token chunk": _typed(TokenChunk, ANSWERS),
    "token answer": _typed(TokenAnswer, ANSWERS),
    "result": _result,
    "stored chunks": _stored_chunks,
    "cancel mark": _cancel_mark,
    "dead letter": _dead_letter,
}
"""By what is decoded."""


def mutator(name: str, seed: int) -> Mutator:
    """The inputs of a target."""
    return Mutator(f"{name} {seed}", NAMES)


def accepts(target: Target, make: Mutator) -> bool:
    """Whether one input became a value; anything but an error of the tree is raised."""
    try:
        target(make)
    except InferbusError:
        return False
    return True
