"""Changed messages at every decoder: a value or an error of the tree, never anything else."""

from __future__ import annotations

import os
from typing import Final

import pytest

from tests.fuzz.targets import TARGETS, accepts, mutator

RUNS: Final = int(os.environ.get("FUZZ_RUNS", "1000"))
"""Inputs of each target."""


@pytest.mark.parametrize("name", TARGETS)
def test_every_input_ends_in_a_value_or_an_error_of_the_tree(name: str) -> None:
    make = mutator(name, seed=int(os.environ.get("FUZZ_SEED", "0")))
    accepted = sum(accepts(TARGETS[name], make) for _ in range(RUNS))
    # Inputs that are all refused, or all taken, would show nothing.
    assert accepted > 0
