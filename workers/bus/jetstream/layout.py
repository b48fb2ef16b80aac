"""The configuration of the contract's streams and consumers, in the server's terms."""

from __future__ import annotations

import hashlib
import time
from typing import Any, Final

from inferbus.schemas import fleet
from inferbus.schemas.subjects import JobClass, Subjects, escape
from inferbus.workers.bus.durations import nanoseconds
from inferbus.workers.bus.jetstream.entrance import guarded, guarded_bucket
from inferbus.workers.config import MIB, StreamSettings

JOBS: Final = "INFER_JOBS"
STREAM: Final = "INFER_STREAM"
RESULTS: Final = "INFER_RESULTS"
DEAD: Final = "INFER_DEAD"
CANCEL: Final = "INFER_CANCEL"
OBJECTS: Final = "INFER_OBJECTS"
FILES: Final = "INFER_FILES"
WORKERS: Final = f"KV_{fleet.BUCKET}"
BATCHES: Final = "KV_INFER_BATCHES"
KEYS: Final = "KV_INFER_KEYS"
"""The streams behind key-value buckets (ADR-8)."""

CONTRACT: Final = frozenset({JOBS, STREAM, RESULTS, DEAD, CANCEL, OBJECTS, FILES, WORKERS, BATCHES, KEYS})
"""Every stream, by its name under the default prefix; `in_account` has the name under another one."""

ANNOUNCE_TTL: Final = 10.0
"""Seconds after which a worker that does not announce itself is no longer listed."""

MAX_ACK_PENDING: Final = 100_000
"""Of all workers together; the bound in force is the number of their slots."""

CANCELS_KEPT: Final = 64
"""Cancels of one job id that are remembered; a day long."""

OWNER_JOBS: Final = 10_000
"""Open jobs of one owner for a model, class and kind, where neither settings nor the stream say otherwise."""

CANCEL_BYTES: Final = 1024
"""Of one cancel mark, which has headers only."""

MAX_WAITING: Final = 4096
"""Open pull requests of all workers together."""

UNLIMITED: Final = -1
DAY: Final = 24 * 3600.0


def stream_configs(subjects: Subjects, settings: StreamSettings) -> list[dict[str, Any]]:
    """Every stream.

    The subjects of jobs are added for each model; see `models`. Every call gives guarded streams new keys;
    see `entrance`.

    Streams whose messages must not be lost refuse what does not fit (`discard: new`): jobs, results, dead
    letters, objects, files, batches, API keys, and cancel marks, which one owner could push out with many
    of its own. Chunks are discarded by age instead (`discard: old`), since a worker must never wait for their
    readers.
    """
    s = settings
    jobs = _stream(JOBS, [], s, s.jobs_max_bytes, s.jobs_max_age)
    chunks = _stream(STREAM, [subjects.all("stream")], s, s.stream_max_bytes, s.stream_max_age)
    results = _stream(RESULTS, [], s, s.results_max_bytes, s.results_max_age)
    dead = _stream(DEAD, [], s, s.dead_max_bytes, s.dead_max_age)
    cancel = _stream(CANCEL, [subjects.all("cancel")], s, 64 * MIB, DAY)
    objects = _stream(OBJECTS, [subjects.all("objects")], s, s.objects_max_bytes, s.results_max_age)
    files = _stream(FILES, [subjects.all("files")], s, s.files_max_bytes, 0)
    workers = _stream(WORKERS, [key(subjects, WORKERS, ">")], s, 16 * MIB, ANNOUNCE_TTL)
    batches = _stream(BATCHES, [key(subjects, BATCHES, ">")], s, 256 * MIB, 0)
    keys = _stream(KEYS, [], s, 16 * MIB, 0)
    light = _light(settings)
    # As ADR-8 lays out a bucket, so that `nats kv` reads it.
    bucket = {"max_msgs_per_subject": 1, "allow_rollup_hdrs": True, "deny_delete": True}
    return [
        _capped(jobs, settings) | {"retention": "workqueue"},
        chunks | light | {"discard": "old", "max_msgs_per_subject": settings.stream_max_chunks},
        guarded(results, subjects, ("results", "attempts")),
        guarded(dead, subjects, ("dead",)),
        objects,
        files,
        # More than one mark per job: each may be for another submission with the same id.
        cancel
        | {
            "max_msgs_per_subject": CANCELS_KEPT,
            "discard_new_per_subject": True,
            "max_msg_size": CANCEL_BYTES,
        },
        workers | light | bucket,
        batches | bucket,
        guarded_bucket(keys | bucket, subjects, key(subjects, KEYS, ">")),
    ]


def in_account(name: str, subjects: Subjects) -> str:
    """The name of one of the contract's streams as the server has it; any other name stays as it is.

    Deployments with prefixes of their own share an account, and nothing in it: `infer` has `INFER_JOBS`,
    `acme.llm` has `ACME_LLM_JOBS`. Where two prefixes make one name, provisioning refuses the second one.
    """
    return name.replace("INFER", subjects.prefix.upper().replace(".", "_"), 1) if name in CONTRACT else name


def key(subjects: Subjects, stream: str, name: str) -> str:
    """The subject of a key, or a filter, of the key-value bucket behind a stream."""
    return f"$KV.{in_account(stream, subjects).removeprefix('KV_')}.{name}"


def batch_key(subjects: Subjects, owner: str, batch: str, name: str = "state") -> str:
    """The subject of a batch's record, or of another key of it; or a filter, by `*` for the batch."""
    return key(subjects, BATCHES, f"{escape(owner)}.{batch if batch == '*' else escape(batch)}.{name}")


def new_stream(config: dict[str, Any], subjects: Subjects) -> dict[str, Any]:
    """What a stream is made with where it is not there: more than one that is there is compared with.

    Submissions and results are known by their sequences, also after their stream was deleted and made again.
    So it does not begin at 1, but at the time in microseconds: above every sequence that it ever had.
    """
    new = dict(config)
    if config["name"] == JOBS:
        new["subjects"] = [no_jobs(subjects)]
        new.setdefault("max_msgs_per_subject", OWNER_JOBS)
        new["discard_new_per_subject"] = True
    if config["name"] in (JOBS, RESULTS):
        new["first_seq"] = time.time_ns() // 1000
    return new


def no_jobs(subjects: Subjects) -> str:
    """What the stream of jobs captures before it has a model: it needs a subject, and this is no job's."""
    return f"{subjects.prefix}.jobs"


def _capped(jobs: dict[str, Any], settings: StreamSettings) -> dict[str, Any]:
    """With a limit of jobs per subject, which names the owner; a job leaves the stream when it ends."""
    if settings.owner_jobs:
        return jobs | {"max_msgs_per_subject": settings.owner_jobs, "discard_new_per_subject": True}
    return {name: value for name, value in jobs.items() if name != "max_msgs_per_subject"}


def _light(settings: StreamSettings) -> dict[str, Any]:
    """Storage without a sync for each message.

    A single server loses a stream in memory when it restarts, and jobs then cannot be continued. A file that
    is written after the acknowledgement (nats-server 2.12) lost the last 4 of 60,100 chunks to a SIGKILL, and
    is as fast as memory: 30,000 chunks/s, where a file with `sync_interval: always` takes 300. The server
    refuses that mode for replicated streams, which outlive the loss of one server in memory as well.
    """
    if settings.replicas > 1:
        return {"storage": "memory"}
    return {"storage": "file", "persist_mode": "async"}


def guarded_stream(subject: str, subjects: Subjects) -> str | None:
    """The stream that holds a subject and is written to by its entrance; None for every other subject."""
    if subject.startswith(key(subjects, KEYS, "")):
        return KEYS
    family = subject.removeprefix(f"{subjects.prefix}.").partition(".")[0]
    return {"results": RESULTS, "attempts": RESULTS, "dead": DEAD}.get(family)


def job_consumer(subjects: Subjects, model: str, job_class: JobClass, *, ack_wait: float) -> dict[str, Any]:
    """The durable consumer of one model and class, shared by all its workers.

    Without `max_deliver`: workers bound attempts and write the dead letter. At a bound of its own the server
    keeps the job and delivers it to nobody any more.
    """
    return {
        "durable_name": durable(model, job_class),
        "filter_subject": subjects.jobs_of(model, job_class),
        "deliver_policy": "all",
        "replay_policy": "instant",
        "ack_policy": "explicit",
        "ack_wait": nanoseconds(ack_wait),
        "max_deliver": UNLIMITED,
        "max_ack_pending": MAX_ACK_PENDING,
        "max_waiting": MAX_WAITING,
    }


def durable(model: str, job_class: JobClass) -> str:
    """The name of the durable consumer of a model and class; the server takes 255 characters."""
    name = f"{escape(model)}-{job_class}"
    if len(name) <= 200:
        return name
    return f"{name[:150]}-{hashlib.sha256(name.encode()).hexdigest()[:24]}-{job_class}"


def _stream(
    name: str, subjects: list[str], settings: StreamSettings, max_bytes: int, max_age: float
) -> dict[str, Any]:
    # The server refuses a window that is longer than messages live.
    window = min(settings.duplicate_window, max_age or settings.duplicate_window)
    return {
        "name": name,
        "subjects": subjects,
        "retention": "limits",
        "storage": "file",
        "discard": "new",
        "max_bytes": max_bytes,
        "max_age": nanoseconds(max_age),
        "max_msgs": UNLIMITED,
        "max_msgs_per_subject": UNLIMITED,
        "max_msg_size": UNLIMITED,
        "max_consumers": UNLIMITED,
        "num_replicas": settings.replicas,
        "duplicate_window": nanoseconds(window),
        "allow_direct": True,
    }
