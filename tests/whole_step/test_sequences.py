"""Packed, padded and masked sequences, flex attention, and sizes that no axis divides: training equals one process."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import pytest

from fxpar.world.launch import run_ranks
from tests.support.sequences import CASES, check_sequences

ON = [
    ({"pipe": 2, "x": 2}, ["packed, of several lengths", "padded", "masks"]),
    ({"pipe": 2, "x": 2}, ["flex, packed", "flex"]),
    ({"x": 2}, ["odd sizes", "odd sizes, grouped queries", "odd sizes, one head of keys"]),
    ({"x": 2}, ["flex, odd heads", "flex, checkpointed", "flex, inductor"]),
    ({"z": 2}, ["flattened", "packed, eager attention", "flex, given mask"]),
    ({"pipe": 2}, ["flex, padded", "flex, odd sizes", "flex, added masks"]),
]


@pytest.mark.parametrize(("mesh", "names"), ON, ids=[f"{mesh}, {names[0]}" for mesh, names in ON])
def test_sequences_train_as_on_one_process(mesh: Mapping[str, int], names: Sequence[str]) -> None:
    run_ranks(math.prod(mesh.values()), check_sequences, mesh, names)


def test_every_case_is_trained() -> None:
    assert sorted(name for _, names in ON for name in names) == sorted(CASES)
