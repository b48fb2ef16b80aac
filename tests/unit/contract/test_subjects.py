"""Subjects: built, parsed, and never to be talked into something else."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from inferbus.schemas import limits
from inferbus.schemas.errors import InvalidReplySubject, InvalidSubject
from inferbus.schemas.subjects import CLASSES, KINDS, LIVE_OWNER, JobClass, Kind, Subjects, escape, unescape

SUBJECTS = Subjects()
LEGAL = re.compile(r"[A-Za-z0-9_=-]+(\.[A-Za-z0-9_=-]+)*")
NAMES = st.text(min_size=1, max_size=limits.SUBJECT_TOKEN_BYTES).filter(
    lambda text: (
        not any(0xD800 <= ord(char) < 0xE000 for char in text)
        and len(text.encode()) <= limits.SUBJECT_TOKEN_BYTES
    )
)
OWNERS = NAMES.filter(lambda name: name != LIVE_OWNER)


def legal(subject: str) -> str:
    assert LEGAL.fullmatch(subject)
    assert len(subject) <= limits.SUBJECT_CHARS
    return subject


@given(NAMES)
@example("meta-llama/Llama-3.1-8B-Instruct")
@example("a.b.*.>")
@example("=41")
@example("\r\nPUB x 0\r\n")
@example("名前")
def test_escaping_is_reversible_and_makes_one_legal_token(name: str) -> None:
    token = escape(name)
    assert "." not in legal(token)
    assert unescape(token) == name


@given(st.text(max_size=12))
@example("=2e")
@example("=41")
@example("=FF")
@example("a.b")
@example("*")
def test_what_escape_never_makes_is_not_unescaped(token: str) -> None:
    """One name has one token: otherwise two subjects would be one owner's."""
    try:
        name = unescape(token)
    except InvalidSubject:
        return
    assert escape(name) == token


@pytest.mark.parametrize(
    "name",
    ["", "x" * (limits.SUBJECT_TOKEN_BYTES + 1), "é" * limits.SUBJECT_TOKEN_BYTES, "\ud800"],
    ids=ascii,
)
def test_a_name_that_no_subject_can_carry_is_refused(name: str) -> None:
    with pytest.raises(InvalidSubject):
        escape(name)


@given(NAMES, OWNERS, NAMES, st.sampled_from(KINDS), st.sampled_from(CLASSES))
def test_every_subject_is_legal_and_parses_back(
    model: str, owner: str, job: str, kind: Kind, job_class: JobClass
) -> None:
    address = SUBJECTS.parse_request(legal(SUBJECTS.request(model, kind)))
    assert (address.model, address.kind) == (model, kind)
    found = SUBJECTS.parse_job(legal(SUBJECTS.job(model, job_class, owner, kind)))
    assert (found.model, found.job_class, found.owner, found.kind) == (model, job_class, owner, kind)
    for family, subject in (
        ("stream", SUBJECTS.stream(owner, job)),
        ("results", SUBJECTS.result(owner, job)),
        ("cancel", SUBJECTS.cancel(owner, job)),
    ):
        key = SUBJECTS.parse_key(legal(subject), family)  # type: ignore[arg-type]
        assert (key.owner, key.job) == (owner, job)
    for subject in (SUBJECTS.prefill(model), SUBJECTS.prefill(model, job), SUBJECTS.dead(model, kind)):
        legal(subject)


@given(OWNERS, NAMES)
def test_the_default_reply_subject_is_always_allowed(owner: str, job: str) -> None:
    subject = SUBJECTS.stream(owner, job)
    assert SUBJECTS.check_reply(subject, owner=owner) == subject


@pytest.mark.parametrize("word", ["tokens.x", "Chat", "*", "", "chat\r\n"])
def test_a_kind_or_class_that_is_none_builds_no_subject(word: Any) -> None:
    builds: tuple[Callable[[], str], ...] = (
        lambda: SUBJECTS.request("m", word),
        lambda: SUBJECTS.job("m", "batch", "o", word),
        lambda: SUBJECTS.job("m", word, "o", "chat"),
        lambda: SUBJECTS.jobs_of("m", word),
        lambda: SUBJECTS.dead("m", word),
    )
    for build in builds:
        with pytest.raises(InvalidSubject):
            build()


def test_the_owner_of_live_requests_is_nobody_elses() -> None:
    with pytest.raises(InvalidSubject):
        SUBJECTS.job("m", "batch", LIVE_OWNER, "chat")
    with pytest.raises(InvalidSubject):
        SUBJECTS.parse_job(f"infer.jobs.m.batch.{LIVE_OWNER}.chat")


@pytest.mark.parametrize(
    "subject",
    [
        "",
        "infer.jobs.m.batch.o",
        "infer.jobs.m.batch.o.chat.x",
        "infer.jobs.m.batch.*.chat",
        "infer.jobs.m.batch.>.chat",
        "infer.jobs.m.batch..chat",
        "infer.jobs.m.slow.o.chat",
        "infer.jobs.m.batch.o.images",
        "infer.jobs.m=2e.batch.o.chat",
        "infer.job.m.batch.o.chat",
        "other.jobs.m.batch.o.chat",
    ],
)
def test_another_subject_is_no_job(subject: str) -> None:
    with pytest.raises(InvalidSubject):
        SUBJECTS.parse_job(subject)


@given(st.text(max_size=60))
def test_arbitrary_subjects_never_raise_outside_the_error_tree(subject: str) -> None:
    parsers: tuple[Callable[[str], object], ...] = (
        SUBJECTS.parse_request,
        SUBJECTS.parse_job,
        partial(SUBJECTS.parse_key, family="stream"),
        partial(SUBJECTS.check_reply, owner="o"),
    )
    for parser in parsers:
        with suppress(InvalidSubject, InvalidReplySubject):
            parser(subject)


@pytest.mark.parametrize(
    "subject", ["_INBOX.abc", "_INBOX.abc.1", "infer.stream.alice.j1", "infer.stream.alice.=2E"], ids=str
)
def test_an_inbox_and_the_owners_own_stream_are_reply_subjects(subject: str) -> None:
    assert SUBJECTS.check_reply(subject, owner="alice") == subject


@pytest.mark.parametrize(
    "subject",
    [
        pytest.param("$JS.API.STREAM.DELETE.INFER_JOBS", id="api"),
        pytest.param("jobs.x", id="other"),
        pytest.param("infer.jobs.m.batch.alice.chat", id="jobs"),
        pytest.param("infer.results.alice.j", id="results"),
        pytest.param("infer.cancel.alice.j", id="cancel"),
        pytest.param("a.*", id="wildcard"),
        pytest.param("_INBOX.a*b", id="star-in-a-token"),
        pytest.param("_INBOX.a>b", id="arrow-in-a-token"),
        pytest.param("a..b", id="empty-token"),
        pytest.param("", id="empty"),
        pytest.param("_INBOX", id="prefix-only"),
        pytest.param("_INBOX.", id="prefix-dot"),
        pytest.param("_INBOX.*", id="inbox-wildcard"),
        pytest.param("_INBOX.>", id="inbox-all"),
        pytest.param("_INBOX.a..b", id="inbox-empty-token"),
        pytest.param("_INBOX.$SYS", id="dollar"),
        pytest.param("_INBOXES.a", id="lookalike"),
        pytest.param("infer.stream.bob.j1", id="anothers-stream"),
        pytest.param("infer.stream.alice.", id="no-job"),
        pytest.param("infer.stream.alice.j.x", id="too-many-tokens"),
        pytest.param("infer.stream.alice.>", id="stream-wildcard"),
        pytest.param("infer.stream.alice2.j", id="longer-owner"),
        pytest.param("_INBOX.x\r\nPUB jobs.a 0\r\n\r\n", id="crlf"),
        pytest.param("_INBOX.x y", id="blank"),
        pytest.param("_INBOX.x\t", id="tab"),
        pytest.param("_INBOX.\x00", id="nul"),
        pytest.param("_INBOX.é", id="not-ascii"),
        pytest.param("_INBOX." + "x" * limits.SUBJECT_CHARS, id="too-long"),
    ],
)
def test_a_worker_is_no_way_to_publish_elsewhere(subject: str) -> None:
    with pytest.raises(InvalidReplySubject) as caught:
        SUBJECTS.check_reply(subject, owner="alice")
    assert caught.value.param == "Infer-Reply-To"


@pytest.mark.parametrize("prefix", ["", "a.", ".a", "a..b", "a b", "a.*", "a=41", "$SYS", "x" * 65])
def test_a_prefix_that_is_no_subject_is_refused(prefix: str) -> None:
    with pytest.raises(InvalidSubject):
        Subjects(prefix)
