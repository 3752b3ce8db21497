"""Strides of tensors without gaps."""

from __future__ import annotations

from itertools import permutations

import pytest
import torch

from fxpar.ir.strides import dense_strides, inverse


@pytest.mark.parametrize("shape", [(), (5,), (2, 3, 4), (2, 1, 3), (2, 0, 3)], ids=str)
def test_dense_strides_are_those_of_a_permuted_contiguous_tensor(shape: tuple[int, ...]) -> None:
    for order in permutations(range(len(shape))):
        made = torch.empty([shape[dim] for dim in order]).permute(inverse(order))
        assert tuple(made.shape) == shape
        assert dense_strides(shape, order) == made.stride()
