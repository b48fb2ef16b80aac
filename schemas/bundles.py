"""Bundles: several requests of one kind in one durable job, and their answers in one result.

A synced message costs the server a millisecond, whatever it holds. A bundle is tried once. What it leaves
unanswered is its submitter's to send again, so a request that harms its worker costs the others one attempt.
"""

from __future__ import annotations

from typing import Final

import msgspec

from inferbus.schemas.errors import ErrorBody

CONTENT_TYPE: Final = "application/vnd.inferbus.bundle+json"
"""Of the job and of its result."""


class Item(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One request of a bundle.

    Attributes:
        id: Its number, unique in the bundle; the submitter's own.
        body: The request, as the job's kind defines it; chunks are never sent of it.
    """

    id: int
    body: msgspec.Raw


class Bundle(msgspec.Struct, frozen=True, kw_only=True):
    """The body of a job that is a bundle."""

    items: list[Item]


class ItemAnswer(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The answer to one request of a bundle, as a job of its own would have it as its result."""

    id: int
    answer: msgspec.Raw


class ItemError(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The error that one request of a bundle ended in for good."""

    id: int
    error: ErrorBody


class BundleAnswer(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """The result of a bundle.

    Attributes:
        job: The job's id.
        attempt: From 1; it counts deliveries that were put back, too.
        answers: Of the requests that were answered, in the order in which they were.
        errors: Of those that ended in an error of their caller's, were cancelled, or passed their deadline.
        unstarted: Requests that were not begun, and can be sent in a bundle again. Those that are in none of
            the three failed, or their worker ended: each is to be sent as a job of its own, which has the
            attempts and the quarantine that the delivery contract gives it.
        died: Whether a worker ended while it ran the bundle; nothing was run again then.
        partial: Whether it is sent while the bundle runs: answers and errors of requests that ended since the
            one before. It is not stored, and may be lost; the result has them all again.
    """

    job: str
    attempt: int
    answers: list[ItemAnswer]
    errors: list[ItemError] = []
    unstarted: list[int] = []
    died: bool = False
    partial: bool = False
