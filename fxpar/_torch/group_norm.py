"""Group norm on fake tensors, to which PyTorch gives other strides than its kernel. Seen in torch 2.14."""

import functools
from typing import Any

import torch
from torch import Tensor
from torch._prims_common import suggest_memory_format
from torch._subclasses.fake_impls import register_op_impl
from torch._subclasses.fake_tensor import FakeTensorMode


@functools.cache
def correct_strides_of_group_norm() -> None:
    """Let fake results of group norm on CPUs have the memory format of the input, as the kernel's do.

    Since torch 2.14 the fake ones are contiguous, so that a view of a gradient behind them could fail in a step.
    """
    register_op_impl(torch.ops.aten.native_group_norm.default)(_group_norm)


def _group_norm(mode: FakeTensorMode, op: Any, given: Tensor, *args: Any, **kwargs: Any) -> Any:
    memory_format = suggest_memory_format(given)
    if given.device.type != "cpu" or memory_format is torch.contiguous_format:
        return NotImplemented  # PyTorch is right
    with mode:
        normalized, *statistics = op(given.contiguous(), *args, **kwargs)
        return normalized.contiguous(memory_format=memory_format), *statistics
