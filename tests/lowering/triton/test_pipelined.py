"""PyTorch's fused ops compute what ours define, where they are taken; by its own definition of them, without a GPU."""

from __future__ import annotations

import torch
import torch.distributed as dist

from fxpar.ir.fused_ops import all_gather_matmul_reference, matmul_reduce_scatter_reference
from fxpar.lowering.triton.pipelined import (
    gather_pipelined,
    has_pipelined_gather,
    has_pipelined_scatter,
    scatter_pipelined,
)
from fxpar.world.launch import run_ranks
from tests.lowering.triton.products import factor


def test_the_ops_of_pytorch_compute_what_ours_define() -> None:
    run_ranks(2, compare_with_references)


def compare_with_references() -> None:
    """On each rank."""
    from torch.distributed import _symmetric_memory

    assert dist.group.WORLD is not None
    rank, group = dist.get_rank(), dist.group.WORLD.group_name
    shard, others = factor(6, 8, seed=rank), [factor(8, 5, seed=7), factor(8, 3, seed=8)]
    biases = [factor(5, seed=9), None]
    definitions = torch.library.Library("symm_mem", "IMPL", "CPU")
    with _symmetric_memory._test_mode():  # where the ops of the GPU are collectives and matmuls
        definitions.impl("fused_all_gather_matmul", _symmetric_memory._fused_all_gather_matmul)
        definitions.impl("fused_matmul_reduce_scatter", _symmetric_memory._fused_matmul_reduce_scatter)
        for keeps in (False, True):
            found = gather_pipelined(shard, others, biases, keeps, group)
            expected = all_gather_matmul_reference(shard, others, biases, "rows", 1, 2, keeps, group)
            assert len(found) == len(expected)
            assert all(one.allclose(other) for one, other in zip(found, expected, strict=True))
        left, right = factor(12, 8, seed=rank), factor(8, 5, seed=20 + rank)
        piece = scatter_pipelined(left, right, group)
        assert piece.allclose(matmul_reduce_scatter_reference(left, right, None, "rows", 1, 2, group))


def test_other_forms_have_no_op_in_pytorch() -> None:
    matrix, batch = torch.empty(4, 4), torch.empty(2, 4, 4)
    assert has_pipelined_gather("rows", 1, matrix) and has_pipelined_scatter("rows", 1, matrix, None)
    for form, outer, factors in (("columns", 1, matrix), ("rows", 2, matrix), ("rows", 1, batch)):
        assert not has_pipelined_gather(form, outer, factors)
        assert not has_pipelined_scatter(form, outer, factors, None)
    assert not has_pipelined_scatter("rows", 1, matrix, matrix[0])
