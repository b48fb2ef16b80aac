"""The error tree: every leaf has its own code, says whose fault it is, and survives the wire."""

from __future__ import annotations

import pickle

import msgspec
import pytest

from inferbus.schemas import errors
from inferbus.schemas.errors import (
    BY_CODE,
    AttemptsExhausted,
    CallerError,
    Ended,
    ErrorAnswer,
    ErrorBody,
    InferbusError,
    InfrastructureError,
    WorkerError,
    from_body,
)

LEAVES = [kind for kind in BY_CODE.values() if not kind.__subclasses__()]


def test_no_two_classes_share_a_code() -> None:
    classes = [
        kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, InferbusError)
    ]
    assert len({kind.code for kind in classes}) == len(classes) == len(BY_CODE)


@pytest.mark.parametrize("kind", LEAVES, ids=lambda kind: kind.code)
def test_every_error_says_whose_fault_it_is_and_whether_to_try_again(kind: type[InferbusError]) -> None:
    families = [
        base for base in (CallerError, Ended, InfrastructureError, WorkerError) if issubclass(kind, base)
    ]
    assert len(families) == 1
    # After the last attempt it is this service that failed, but the caller is not told to go on trying.
    ours = families[0] in (InfrastructureError, WorkerError) and kind is not AttemptsExhausted
    assert kind.retryable == ours


@pytest.mark.parametrize("kind", LEAVES, ids=lambda kind: kind.code)
def test_every_error_survives_the_wire_and_a_process_boundary(kind: type[InferbusError]) -> None:
    error = kind("why", param="x.y")
    answer = msgspec.json.decode(msgspec.json.encode(ErrorAnswer(error=error.body())), type=ErrorAnswer)
    for copy in (from_body(answer.error), pickle.loads(pickle.dumps(error))):
        assert type(copy) is kind
        assert (copy.message, copy.param, str(copy)) == ("why", "x.y", "why")


@pytest.mark.parametrize(("retryable", "kind"), [(True, InfrastructureError), (False, CallerError)])
def test_an_unknown_code_of_a_newer_peer_keeps_its_meaning(
    retryable: bool, kind: type[InferbusError]
) -> None:
    error = from_body(ErrorBody(code="of_tomorrow", message="m", retryable=retryable))
    assert type(error) is kind
