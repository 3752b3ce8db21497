"""Ops on lists of DTensors that PyTorch does not shard: fused SGD and Adagrad, and copies; seen in torch 2.13."""

import functools

import torch
from torch.distributed.tensor._ops import _pointwise_ops

_ELEMENTWISE = (torch.ops.aten._fused_sgd_, torch.ops.aten._fused_adagrad_, torch.ops.aten._foreach_copy_)


@functools.cache
def register_list_ops() -> None:
    """Tell DTensor that these compute element by element, where it has the function by which others tell it."""
    register = getattr(_pointwise_ops, "_register_single_dim_pointwise", None)
    if register is not None:
        for op in _ELEMENTWISE:
            for overload in op.overloads():
                register(getattr(op, overload))
