"""The client's public surface."""

from __future__ import annotations

from inferbus.workers import client


def test_the_public_surface_is_what_it_was() -> None:
    """A name that leaves breaks somebody's program: change this list knowingly."""
    assert client.__all__ == sorted(client.__all__)
    assert all(hasattr(client, name) for name in client.__all__)
    assert " ".join(client.__all__) == (
        "Answer AnswerLost AnswerStream Chunk Client ConnectionLost FinalStatus Job JobIdUsed JobNotFound "
        "JobStream LiveStream Message Restarted Result Stats SyncClient SyncStream TimedOut ToolCall "
        "WorkerLost message text"
    )
