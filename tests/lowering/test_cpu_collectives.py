"""The reduce-scatter that runs on CPUs returns what gloo's returns, and is waited on like any other collective."""

from __future__ import annotations

import gc

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from fxpar._torch.distributed import c10d_functional
from fxpar.lowering import lower
from fxpar.lowering.cpu_collectives import replace_cpu_collectives
from fxpar.world.launch import run_ranks
from tests.lowering.graphs import traced

RANKS = 3


def values(rank: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(2 * RANKS, 5, generator=generator).to(dtype)


def scatter_in_two_graphs(dtype: torch.dtype) -> tuple[list[Tensor], Tensor]:
    """A sum that one graph starts and another waits for, and a maximum; also what gloo returns for the sum."""
    group = dist.group.WORLD.group_name
    scatter = c10d_functional.reduce_scatter_tensor
    given = values(dist.get_rank(), dtype)
    start = traced(lambda x: (scatter(x, "sum", RANKS, group), scatter(x, "max", RANKS, group)), given)
    finish = traced(
        lambda *started: tuple(map(c10d_functional.wait_tensor, started)), torch.empty(2, 5), torch.empty(2, 5)
    )
    under_way = lower("aten")(start)(given)
    gc.collect()
    gloo = c10d_functional.wait_tensor(scatter(given, "sum", RANKS, group))
    found = lower("aten")(finish)(*under_way)
    return [tensor.clone() for tensor in found], gloo


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_pieces_of_sums_and_maxima_reach_their_ranks(dtype: torch.dtype) -> None:
    whole = torch.stack([values(rank, dtype) for rank in range(RANKS)])
    for rank, ((total, greatest), gloo) in enumerate(run_ranks(RANKS, scatter_in_two_graphs, dtype)):
        torch.testing.assert_close(total, gloo)
        assert torch.equal(total, whole.sum(0).chunk(RANKS)[rank])
        assert torch.equal(greatest, whole.amax(0).chunk(RANKS)[rank])


def test_only_reduce_scatters_are_replaced() -> None:
    graph = traced(lambda x: (x + 1,), torch.ones(2))
    assert replace_cpu_collectives(graph) is graph
