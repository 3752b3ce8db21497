"""A step returns the same bits whatever runs beside what, and the dump shows what does."""

from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from fxpar.world.launch import run_ranks
from tests.support.overlapped import bits_under

EACH = {"gather_weights": "microbatch", "reduce_gradients": "microbatch", "lowering": "aten", "fuse": False}


def order_in(folder: Path, name: str) -> list[str]:
    """The starts, waits and products that rank 0's dump of a pass has, in order, by what they are."""
    (path,) = (folder / "rank0").glob(f"*_{name}.stage0.py")
    calls = [line.partition(" = ")[2].partition("(")[0].rpartition(".")[2] for line in path.read_text().splitlines()]
    kinds = {"all_gather_into_tensor": "start", "reduce_scatter_tensor": "start", "all_reduce": "start"}
    return [kinds.get(call, call) for call in calls if call in kinds or call in ("wait_tensor", "mm")]


@pytest.mark.parametrize("sizes", [{"z": 2}, {"x": 2}], ids=str)
def test_communication_beside_computation_changes_no_bit(sizes: dict[str, int], tmp_path: Path) -> None:
    variants = [{"overlap": False}, {}, {"dump": tmp_path, "held_reductions": math.inf}]
    for found in run_ranks(2, bits_under, sizes, [{**EACH, **variant} for variant in variants]):
        for bits in zip(*found, strict=True):
            assert all(torch.equal(bits[0], other) for other in bits[1:])
    before, after = order_in(tmp_path, "partition_backward"), order_in(tmp_path, "overlap_collectives_backward")
    assert sorted(before) == sorted(after)
    beside = [follower for call, follower in pairwise(after) if call == "start"]
    assert "mm" in beside, "a product stands behind a start"
    assert beside.count("wait_tensor") < before.count("start") / 2, "few starts are waited on at once"
