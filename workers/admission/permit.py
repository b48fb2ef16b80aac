"""A request's permission to run."""

from __future__ import annotations

from types import TracebackType

from inferbus.workers.admission.classes import LIVE, ServiceClass


class Permit:
    """Bounds nothing: for requests that no worker holds. `Admission` gives out those that do.

    As a context manager it is closed at the end of the block.

    Attributes:
        service_class: Of the request.
        waited: Seconds that it waited in `enter`.
    """

    def __init__(self, service_class: ServiceClass = LIVE) -> None:
        self.service_class: ServiceClass = service_class
        self.waited = 0.0

    async def enter(self, prompt: int, allowed: int, *, choices: int = 1, certain: bool = False) -> None:
        """Waits until the request may start.

        Args:
            prompt: Its tokens.
            allowed: New tokens that each choice may have at most.
            choices: Sequences that are generated for it.
            certain: Whether it will use all of them (`ignore_eos`).
        """

    def first_token(self) -> None:
        """One of its choices has its first token: its prompt is computed."""

    def generated(self, tokens: int) -> None:
        """So many more tokens were generated, over all choices."""

    def finished(self) -> None:
        """One of its choices has come to its own end; a cancelled one never does."""

    def retracted(self) -> None:
        """The engine took its KV cache away, and will compute it again."""

    def close(self) -> None:
        """It is over, or goes back to its queue; may be called more than once."""

    def __enter__(self) -> Permit:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
