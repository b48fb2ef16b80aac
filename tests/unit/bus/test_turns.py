"""The order in which the jobs of several owners are taken."""

from __future__ import annotations

from inferbus.workers.bus.queue.turns import Waiting, in_turn, place


def jobs(text: str) -> list[Waiting]:
    """`a1 b2`: job 1 of owner a, then job 2 of owner b."""
    return [Waiting(each[0], int(each[1:]), f"reply.{each}") for each in text.split()]


def names(waiting: list[Waiting]) -> str:
    return " ".join(f"{job.owner}{job.sequence}" for job in waiting)


def test_owners_take_turns_and_the_longest_queue_comes_last() -> None:
    ordered = in_turn(jobs("a1 a2 a3 a4 a5 b6 c7 c8"))
    assert names(ordered) == "a1 b6 c7 a2 c8 a3 a4 a5"
    assert ordered[1].reply == "reply.b6"


def test_an_owners_own_jobs_keep_the_order_of_submission() -> None:
    assert names(in_turn(jobs("b6 a4 a1 b5 a2"))) == "b5 a1 b6 a2 a4"


def test_jobs_that_were_in_turn_stay_so_and_a_new_owner_has_its_turn_in_the_first_round() -> None:
    ordered = in_turn(jobs("a1 a2 a3 a4 b5 b6 c7"))
    # One job was taken: the next owner's turn comes first, and the one that was served waits a round.
    assert names(in_turn([*ordered[1:], *jobs("d8 d9")])) == "b5 c7 a2 d8 b6 a3 d9 a4"


def test_no_jobs_are_no_jobs() -> None:
    assert in_turn([]) == []


def test_a_place_in_turn_counts_what_each_owner_has_before_it() -> None:
    counts = {"a": 10_000, "b": 1, "c": 5}
    assert [place(counts, turn) for turn in (1, 2, 6)] == [3, 5, 12]
