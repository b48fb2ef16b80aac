"""What a soak found: tables for people, and what workers logged of the jobs at fault."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any, Final, get_args

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from tests.soak.audit import Audit
from tests.soak.chaos import Chaos
from tests.soak.fleet import Fleet
from tests.soak.jobs import PARTS, End
from tests.soak.ledger import Fault, Ledger, Problem

SHOWN: Final = 20
"""Problems that are printed."""

ENDINGS: Final[tuple[End, ...]] = get_args(End)
FAULTS: Final[tuple[Fault, ...]] = get_args(Fault)
_OWN: Final = ("event", "level", "timestamp", "worker", "role", "job", "owner", "kind", "submission")


def show(console: Console, *, ledger: Ledger, audit: Audit, chaos: Chaos, fleet: Fleet) -> None:
    """Prints all of it."""
    console.print(_jobs(ledger, audit))
    console.print(_troubles(ledger, audit, chaos, fleet))
    shown = ledger.problems[:SHOWN]
    courses = _courses(fleet, {problem.sequence for problem in shown} - {None})
    for problem in shown:
        _show_problem(console, problem, courses.get(problem.sequence or 0, []))
    if hidden := len(ledger.problems) - len(shown):
        console.print(f"… and {hidden} more", style="red")


def _jobs(ledger: Ledger, audit: Audit) -> Table:
    """One row for each part, and one for all."""
    columns = ("submitted", "finished", *ENDINGS, "read", "again", "went on", "letters", *FAULTS)
    counts: dict[str, Counter[str]] = {name: Counter() for name in PARTS}
    for sequence, submission in ledger.submissions.items():
        row = counts[submission.order.name]
        row["submitted"] += 1
        row["letters"] += sequence in audit.letters
        if (ending := audit.endings.get(sequence)) is not None:
            row["finished"] += 1
            row[ending.end or "?"] += 1
            row["again"] += ending.attempt > 1
            row["went on"] += ending.continued
    for reading in ledger.readings:
        counts[reading.submission.order.name]["read"] += 1
    for problem in ledger.problems:
        if problem.part is not None:
            counts[problem.part][problem.fault] += 1
    total: Counter[str] = sum(counts.values(), Counter())
    # Also those that are no job's.
    total |= Counter(problem.fault for problem in ledger.problems)
    table = Table("jobs", *columns, title="jobs", show_footer=False)
    for column in table.columns[1:]:
        column.justify = "right"
    for name, row in counts.items():
        table.add_row(name, *_cells(row, columns))
    table.add_section()
    table.add_row("all", *_cells(total, columns), style="bold")
    return table


def _cells(row: Counter[str], columns: Iterable[str]) -> list[str]:
    return [f"{row[column]:,}" if row[column] else "·" for column in columns]


def _troubles(ledger: Ledger, audit: Audit, chaos: Chaos, fleet: Fleet) -> Table:
    """What happened, and how often."""
    table = Table("what happened", "times", title="meanwhile")
    table.columns[1].justify = "right"
    late = sum(reading.late for reading in ledger.readings)
    attempts = max((ending.attempt for ending in audit.endings.values()), default=0)
    sections = [
        sorted(chaos.done.items()),
        [(f"worker ended: {how}", count) for how, count in sorted(fleet.ended.items())],
        [
            ("jobs stored by the server", audit.stored),
            ("handed in twice, stored once", ledger.repeated),
            ("handed in twice, stored twice", len(ledger.repeats)),
            ("most attempts at one job", attempts),
            ("sound jobs without an attempt left", audit.worn_out),
            ("streams read live", len(ledger.readings) - late),
            ("streams read late", late),
            ("reading begun anew", sum(reading.reopened for reading in ledger.readings)),
        ],
    ]
    for section in sections:
        for what, count in section:
            table.add_row(what, f"{count:,}")
        table.add_section()
    return table


def _courses(fleet: Fleet, sequences: set[int | None]) -> dict[int, list[str]]:
    """What workers logged of these submissions, in the order of time."""
    found: dict[int, list[tuple[str, str]]] = {}
    if sequences:
        for event in fleet.events():
            if event.get("submission") in sequences:
                line = f"{event['timestamp'][11:23]} {event['worker']:<6} {event['event']}{_facts(event)}"
                found.setdefault(event["submission"], []).append((event["timestamp"], line))
    return {sequence: [line for _, line in sorted(lines)] for sequence, lines in found.items()}


def _facts(event: dict[str, Any]) -> str:
    return "".join(f" {name}={value}" for name, value in event.items() if name not in _OWN)


def _show_problem(console: Console, problem: Problem, course: list[str]) -> None:
    where = f"job {problem.job}, submission {problem.sequence}: " if problem.job else ""
    console.print(f"[red]{problem.fault}[/] {escape(where + problem.text)}", highlight=False, soft_wrap=True)
    for line in course:
        console.print(f"    {line}", style="dim", markup=False, highlight=False, soft_wrap=True)
