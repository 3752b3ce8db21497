"""PyTorch's own fused ops over symmetric memory, where they compute what the ops of `fxpar.ir.fused_ops` define."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from fxpar._torch.distributed import pipelined_all_gather_matmul, pipelined_matmul_reduce_scatter


def has_pipelined_gather(form: str, outer: int, shard: Tensor) -> bool:
    """Whether PyTorch has an op for this: only for matrices whose rows are gathered, each rank's after another's."""
    return form == "rows" and outer == 1 and shard.dim() == 2


def gather_pipelined(
    shard: Tensor, others: Sequence[Tensor], biases: Sequence[Tensor | None], keeps_gathered: bool, group_name: str
) -> list[Tensor]:
    """`all_gather_matmul` by PyTorch's op, which has no biases: they are added afterwards."""
    gathered, found = pipelined_all_gather_matmul(shard, others, group_name, keeps_gathered=keeps_gathered)
    products = [one if bias is None else one + bias for one, bias in zip(found, biases, strict=True)]
    return [*products, *([] if gathered is None else [gathered])]


def has_pipelined_scatter(form: str, outer: int, left: Tensor, bias: Tensor | None) -> bool:
    """Whether PyTorch has an op for this: as above, and without a bias, which each rank would add to its term."""
    return form == "rows" and outer == 1 and left.dim() == 2 and bias is None


def scatter_pipelined(left: Tensor, right: Tensor, group_name: str) -> Tensor:
    """`matmul_reduce_scatter` by PyTorch's op, which adds terms up in the order of ranks, too."""
    return pipelined_matmul_reduce_scatter(left, right, group_name)
