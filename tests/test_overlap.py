"""A step gives the same bits whatever runs beside what."""

from __future__ import annotations

import pytest
import torch

from fxpar.launch import run_ranks
from tests.overlapped import bits_under

EACH = {"gather_weights": "microbatch", "reduce_gradients": "microbatch", "lowering": "aten"}


@pytest.mark.parametrize("sizes", [{"z": 2}, {"x": 2}], ids=str)
def test_communication_beside_computation_changes_no_bit(sizes: dict[str, int]) -> None:
    variants = [{"overlap": False}, {}, {"gather_ahead_bytes": 5000}]
    for found in run_ranks(2, bits_under, sizes, [{**EACH, **variant} for variant in variants]):
        alone, *others = found
        assert all(all(map(torch.equal, alone, other)) for other in others)
