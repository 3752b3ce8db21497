"""Fused steps of SGD and Adagrad on DTensors, of which PyTorch knows how only Adam's shard; seen in torch 2.13."""

import functools

import torch
from torch.distributed.tensor._ops import _pointwise_ops

_FUSED = (torch.ops.aten._fused_sgd_, torch.ops.aten._fused_adagrad_)


@functools.cache
def let_fused_optimizers_step() -> None:
    """Tell DTensor that these compute element by element, where it has the function by which Adam's tell it."""
    register = getattr(_pointwise_ops, "_register_single_dim_pointwise", None)
    if register is not None:
        for op in _FUSED:
            for overload in op.overloads():
                register(getattr(op, overload))
