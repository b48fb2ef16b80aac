"""What may be imported without what: a client has no torch, and the contract has nothing but msgspec."""

from __future__ import annotations

import importlib.resources
import subprocess
import sys
from types import ModuleType

import pytest

import inferbus
from inferbus import schemas
from inferbus.schemas.errors import BY_CODE
from inferbus.workers import client

HEAVY = ("torch", "sglang", "nixl", "transformers", "numpy")
NETWORK = ("nats", "nkeys")
WORKER = ("uvloop", "prometheus_client")
TERMINAL = ("click", "rich", "structlog")


@pytest.mark.parametrize(
    ("module", "forbidden"),
    [
        ("inferbus", ("msgspec", *HEAVY, *NETWORK, *TERMINAL)),
        ("inferbus.schemas", (*HEAVY, *NETWORK, *TERMINAL, "inferbus.workers")),
        ("inferbus.schemas.export", (*HEAVY, *NETWORK, *TERMINAL, "inferbus.workers")),
        ("inferbus.workers.client", (*HEAVY, *WORKER, "click")),
        ("inferbus.workers.engine.interface", (*HEAVY, *NETWORK)),
        ("inferbus.workers.engine.scripted", (*HEAVY, *NETWORK)),
    ],
)
def test_importing_one_does_not_import_the_other(module: str, forbidden: tuple[str, ...]) -> None:
    code = f"import sys, {module}; print(*sorted(m for m in {forbidden!r} if m in sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.split() == []


def test_the_contract_needs_msgspec_alone() -> None:
    code = (
        "import sys; before = set(sys.modules); import inferbus.schemas; "
        "print(*sorted({m.split('.')[0] for m in set(sys.modules) - before} - set(sys.stdlib_module_names)))"
    )
    done = subprocess.run(
        [sys.executable, "-S", "-c", _with_path(code)], check=True, capture_output=True, text=True
    )
    # msgspec itself looks for typing_extensions.
    assert set(done.stdout.split()) - {"typing_extensions"} == {"msgspec", "inferbus"}


def _with_path(code: str) -> str:
    """`-S` keeps out what `.pth` files import; the paths themselves are still needed."""
    return f"import sys; sys.path[:] = {sys.path!r}; {code}"


@pytest.mark.parametrize("package", [inferbus, schemas, client], ids=lambda package: package.__name__)
def test_the_public_surface_is_sorted_and_every_name_resolves(package: ModuleType) -> None:
    assert list(package.__all__) == sorted(package.__all__)
    assert all(getattr(package, name) is not None for name in package.__all__)
    assert len(set(package.__all__)) == len(package.__all__)
    assert set(package.__all__) <= set(dir(package))


def test_the_package_offers_everything_that_the_client_offers() -> None:
    assert set(client.__all__) <= set(inferbus.__all__)
    assert all(getattr(inferbus, name) is getattr(client, name) for name in client.__all__)


def test_a_name_that_is_not_public_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="'Nothing'"):
        inferbus.Nothing  # noqa: B018


def test_every_error_is_part_of_the_public_surface() -> None:
    abstract = {"InferbusError"}
    assert {kind.__name__ for kind in BY_CODE.values()} | abstract <= set(schemas.__all__)


def test_the_public_surface_is_what_it_was() -> None:
    """A name that leaves breaks somebody's client: change this list knowingly."""
    assert " ".join(schemas.__all__) == PUBLIC


PUBLIC = (
    "AnyComputed AnyRequest AttemptsExhausted Bootstrap BusUnavailable CallerError Cancelled Capacity "
    "ChatRequest CompletionRequest ContextLengthExceeded Continuation DeadlineExceeded DetokenizeAnswer "
    "DetokenizeRequest Draining Embedding EmbeddingsAnswer EmbeddingsRequest Ended EngineFailed "
    "ErrorAnswer ErrorBody FinishReason InferbusError InfrastructureError InternalError "
    "InvalidReplySubject InvalidRequest InvalidSubject JobAddress JobClass JobKey Kind LeaseLost Load "
    "Misdirected ModelNotFound NoWorker NotSupported Overloaded PayloadTooLarge PrefillFailed "
    "PrefillUnavailable PromptTokensDetails Request RequestAddress Retrying Role Sampling Signature "
    "State Status StreamOptions Subjects TextAnswer TextChunk TokenAnswer TokenChoice TokenChunk "
    "TokenLogprobs TokenRequest TokenizeAnswer TokenizeRequest TopLogprob TransferFailed "
    "UndecodableBody UnsupportedContentType Usage WireRequest WorkerError WorkerInfo WrongKind codec "
    "escape handoff headers limits parse read unescape"
)


def test_type_hints_are_shipped() -> None:
    assert importlib.resources.files("inferbus").joinpath("py.typed").is_file()
