"""Somebody who reads an answer as a client does, and what the stored result says it is."""

from __future__ import annotations

from typing import Any

from inferbus.schemas import headers
from inferbus.schemas.answers import TokenAnswer, TokenChunk
from inferbus.workers.bus.interface import Stored
from inferbus.workers.bus.jetstream.layout import RESULTS, STREAM
from inferbus.workers.client.assembler import Assembler, Event, Restarted
from inferbus.workers.client.jobs import Job
from inferbus.workers.client.messages import parse_message, parse_result, submission_of
from tests.simulation.jobs import Submission
from tests.support.simulated import SUBJECTS, Server


class Reader:
    """Somebody who reads a job's answer, by the rules of `inferbus.workers.client.durable`."""

    def __init__(self, server: Server, job: Submission) -> None:
        self._server = server
        self._client = Job(id=job.key.job, owner=job.key.owner, submission=job.sequence)
        self._subject = job.reply
        self.assembler = Assembler()
        self.seen: dict[int, list[Any]] = {}
        self.reasons: dict[int, Any] = {}

    def take(self, message: Stored) -> None:
        """A message of the stream arrives."""
        if message.forwarded or submission_of(message.headers) != self._client.submission:
            return
        found = parse_message(message.data, message.headers, job=self._client.id)
        if found is not None:
            self._show(self.assembler.take(found))

    def look(self) -> None:
        """Reads what is stored."""
        for message in self._server.read(STREAM, self._subject):
            self.take(message)
        if self.assembler.final_status is None:
            stored = self._server.last(RESULTS, SUBJECTS.result(self._client.owner, self._client.id))
            if stored is not None and self._client.matches(stored.headers):
                self._show(self.assembler.finish(parse_result(stored.data, stored.headers)))

    def _show(self, events: list[Event]) -> None:
        for event in events:
            if isinstance(event, Restarted):
                self.seen, self.reasons = {}, {}
            elif isinstance(event, TokenChunk):
                self.seen.setdefault(event.index, []).extend(event.token_ids)
                self._reason(event.index, event.finish_reason)
            else:
                for choice in event["choices"]:
                    text = (choice.get("delta") or choice).get("content") or choice.get("text") or ""
                    self.seen.setdefault(choice["index"], []).extend(text)
                    self._reason(choice["index"], choice.get("finish_reason"))

    def _reason(self, index: int, reason: str | None) -> None:
        if reason is not None:
            self.reasons[index] = reason


def told(result: Stored) -> tuple[dict[int, list[Any]], dict[int, Any]]:
    """What a stored result says: tokens or characters of every choice, and how it ended."""
    answer = parse_result(result.data, result.headers).answer
    if answer is None:
        return {}, {}
    if isinstance(answer, TokenAnswer):
        return (
            {choice.index: list(choice.token_ids) for choice in answer.choices},
            {choice.index: choice.finish_reason for choice in answer.choices},
        )
    assert isinstance(answer, dict)
    texts = {
        c["index"]: list((c.get("message") or c).get("content") or c.get("text") or "")
        for c in answer["choices"]
    }
    return texts, {choice["index"]: choice["finish_reason"] for choice in answer["choices"]}


def agrees(reader: Reader, result: Stored) -> bool:
    """Whether a reader saw what the result says, and that once."""
    outcome = reader.assembler.final_status
    assert outcome is not None
    if outcome.status != result.headers[headers.STATUS]:
        return False
    if outcome.status != "ok":
        return True
    texts, reasons = told(result)
    return reader.seen == texts and reader.reasons == reasons
