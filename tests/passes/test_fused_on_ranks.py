"""On ranks that talk to each other, graphs with fused ops give what they gave before."""

from __future__ import annotations

import pytest
import torch

from fxpar.world.launch import run_ranks
from tests.passes.gathers_to_fuse import GATHERS, KEPT
from tests.passes.reductions_to_fuse import REDUCTIONS, SCATTERS
from tests.passes.run_fused import run_asleep, run_both

# Matrix products of other memory orders add in other orders; the values are sums of a few terms of size one.
TOLERANCES = {torch.float32: {"rtol": 1e-5, "atol": 1e-5}, torch.bfloat16: {"rtol": 1e-2, "atol": 5e-2}}
ALL = [*GATHERS, *KEPT, *SCATTERS, *REDUCTIONS]


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_every_way_of_fusing_gives_the_same(dtype: torch.dtype) -> None:
    """By two ranks, so that sums over ranks have the same bits in any order."""
    for results in run_ranks(2, run_both, ALL, dtype):
        for name, found, expected in results:
            torch.testing.assert_close(
                found, expected, **TOLERANCES[dtype], msg=lambda text, name=name: f"{name}: {text}"
            )
            assert [value.stride() for value in found] == [value.stride() for value in expected]


def test_ranks_that_sleep_instead_of_computing_give_results_of_the_right_kind() -> None:
    for results in run_ranks(2, run_asleep, ALL):
        for found, expected in results:
            assert [(value.shape, value.stride()) for value in found] == [(v.shape, v.stride()) for v in expected]
