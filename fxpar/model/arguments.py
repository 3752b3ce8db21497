"""The forward's tensor arguments: which are split into microbatches, and along which dim."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.nn.attention.flex_attention import BlockMask
from torch.utils import _pytree as pytree

from fxpar._torch.compiler import mark_static, never_compiled
from fxpar.errors import (
    ArgumentFormatError,
    BlockMaskError,
    InvalidOptionError,
    MicrobatchError,
)
from fxpar.model.distribution import Distribution
from fxpar.world.mesh import Mesh, num_batch_shards


def split_dim(
    args: Sequence[Any], kwargs: Mapping[str, Any], batch_dims: Mapping[str | int, int | None], batch_shards: int = 1
) -> list[int | None]:
    """The batch dim of each leaf of (args, kwargs), in pytree order; None for leaves that all microbatches share.

    `batch_dims` overrides by position or keyword. Otherwise every tensor whose first dim has the size of the first
    tensor's first dim is split along it. A DTensor has the rows of all batch shards, any other tensor those of one.
    """
    named: dict[str | int, Any] = dict(enumerate(args))
    named.update(kwargs)
    keyed = [(key, leaf) for key, value in named.items() for leaf in pytree.tree_leaves(value)]
    batch = _batch_size(keyed, batch_dims, batch_shards)
    dims: list[int | None] = []
    for key, leaf in keyed:
        if not isinstance(leaf, torch.Tensor):
            dims.append(None)
        elif key in batch_dims:
            dims.append(batch_dims[key])
        else:
            dims.append(0 if leaf.dim() > 0 and _local_size(leaf, 0, batch_shards) == batch else None)
    return dims


def _batch_size(
    keyed: Sequence[tuple[str | int, Any]], batch_dims: Mapping[str | int, int | None], batch_shards: int
) -> float | None:
    for key, leaf in keyed:
        if isinstance(leaf, torch.Tensor) and leaf.dim() > 0:
            dim = batch_dims.get(key, 0)
            if dim is not None:
                return _local_size(leaf, dim, batch_shards)
    return None


def _local_size(tensor: Tensor, dim: int, batch_shards: int) -> float:
    """The size of a batch shard, if `dim` is the batch's."""
    return tensor.shape[dim] / (batch_shards if isinstance(tensor, DTensor) else 1)


def count_microbatches(leaves: Sequence[Any], dims: Sequence[int | None], wanted: int) -> int:
    """Into how many microbatches a batch of these leaves, with the dims of `split_dim`, is split.

    As many as wanted, or as the next larger number that divides the batch, so that no microbatch takes more memory than
    those of a whole batch; a batch of fewer rows is split into single ones. Dynamo traces this function.
    """
    rows = 0
    for leaf, dim in zip(leaves, dims, strict=True):
        if dim is not None:
            rows = math.gcd(rows, leaf.shape[dim])
    count = min(wanted, rows) if rows > 0 else wanted
    while rows % count > 0:
        count += 1
    return count


@never_compiled  # it runs before what Dynamo is to capture
def prepare_arguments(
    args: tuple[Any, ...], kwargs: dict[str, Any], distribution: Distribution
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Check the arguments of one call, and replace DTensors by this rank's batch shard.

    Shapes are marked static: a new shape recompiles, since layouts and transfer plans are made for fixed sizes.

    Raises:
        MicrobatchError: the batch of the example inputs is not divisible by the number of microbatches.
        BlockMaskError: a block mask was made for the rows of all microbatches.
        ArgumentFormatError: an argument is a sparse or a nested tensor.
        InvalidOptionError: `batch_dims` names an argument that does not exist.
    """
    for key in distribution.batch_dims:
        if key not in kwargs and not (isinstance(key, int) and key < len(args)):
            raise InvalidOptionError(
                "batch_dims", key, f"positions below {len(args)} or keywords among {sorted(kwargs)}"
            )
    dims = split_dim(args, kwargs, distribution.batch_dims, num_batch_shards(distribution.mesh))
    leaves, structure = pytree.tree_flatten((args, kwargs))
    distribution.arguments = structure
    leaves = [_localize(leaf, dim, distribution.mesh) for leaf, dim in zip(leaves, dims, strict=True)]
    for position, (leaf, dim) in enumerate(zip(leaves, dims, strict=True)):
        if isinstance(leaf, torch.Tensor):
            if leaf.layout is not torch.strided:
                raise ArgumentFormatError(repr(distribution.argument_name(position)), leaf.layout)
            mark_static(leaf)
        if isinstance(leaf, BlockMask) and (rows := _rows(leaf)) > 1:
            microbatches = count_microbatches(leaves, dims, distribution.microbatches)
            if microbatches > 1:
                raise BlockMaskError(repr(distribution.argument_name(position)), rows, microbatches)
        if distribution.plan is None and dim is not None and leaf.shape[dim] % distribution.microbatches:
            raise MicrobatchError(
                repr(distribution.argument_name(position)), leaf.shape[dim], distribution.microbatches
            )
    args, kwargs = pytree.tree_unflatten(leaves, structure)
    return args, kwargs


def _localize(leaf: Any, dim: int | None, mesh: Mesh) -> Any:
    """This rank's shard of the batch, if `leaf` is a DTensor, which is global; any other leaf is local already.

    A step returns the gradient of the loss of a batch shard; that of a DTensor is of the mean over all of them.
    """
    if not isinstance(leaf, DTensor):
        return leaf
    wanted: list[Placement] = [
        Shard(dim) if dim is not None and axis in mesh.batch_axes else Replicate() for axis in mesh.stage_axes
    ]
    local: Tensor = leaf.redistribute(mesh.stage_mesh, wanted).to_local()
    if dim is not None and local.requires_grad:
        local.register_hook(lambda gradient: gradient / num_batch_shards(mesh))
    return local


def _rows(mask: BlockMask) -> int:
    """For how many rows a block mask has blocks of their own."""
    *dims, _, _ = mask.shape
    return dims[0] if dims else 1
