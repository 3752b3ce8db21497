"""The attention of PyTorch's GPU kernels, as autograd calls it, made of calls of the CPU's kernel."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import fx

from fxpar.ir.node_meta import tensor

aten = torch.ops.aten

Args: TypeAlias = tuple[Any, ...]

ON_CPU = aten._scaled_dot_product_flash_attention_for_cpu.default
BACKWARD_ON_CPU = aten._scaled_dot_product_flash_attention_for_cpu_backward.default


@dataclass(frozen=True, slots=True)
class Attention:
    """A kernel and that of its gradients.

    forward_args, backward_args: make their arguments of what `Called` and `CalledBackward` have.
    seeds: which results of the forward its backward takes besides the result and the sums of exponents.
    """

    forward: Any
    backward: Any
    forward_args: Callable[[Called], Args]
    backward_args: Callable[[CalledBackward], Args]
    seeds: tuple[int, int]


@dataclass(frozen=True, slots=True)
class Called:
    """The arguments of the CPU's kernel, in its order."""

    q: fx.Node
    k: fx.Node
    v: fx.Node
    dropout: float = 0.0
    is_causal: bool = False
    mask: fx.Node | None = field(default=None, kw_only=True)


@dataclass(frozen=True, slots=True)
class CalledBackward:
    """The arguments of the CPU's backward in its order, and the `seeds` that the GPU's forward has given."""

    grad: fx.Node
    q: fx.Node
    k: fx.Node
    v: fx.Node
    out: fx.Node
    rows: fx.Node
    dropout: float = 0.0
    is_causal: bool = False
    mask: fx.Node | None = field(default=None, kw_only=True)
    seeds: tuple[fx.Node, ...] = field(default=(), kw_only=True)

    @property
    def lengths(self) -> tuple[int, int]:
        """Of queries and keys."""
        return tensor(self.q).shape[-2], tensor(self.k).shape[-2]


def _efficient(call: Called) -> Args:
    return call.q, call.k, call.v, call.mask, True, call.dropout, call.is_causal


def _efficient_backward(call: CalledBackward) -> Args:
    wanted = [True, True, True, False]
    of_forward = call.mask, call.out, call.rows, *call.seeds
    return call.grad, call.q, call.k, call.v, *of_forward, call.dropout, wanted, call.is_causal


def _flash(call: Called) -> Args:
    assert call.mask is None, "it takes no mask"
    return call.q, call.k, call.v, call.dropout, call.is_causal


def _flash_backward(call: CalledBackward) -> Args:
    lengths = None, None, *call.lengths
    return call.grad, call.q, call.k, call.v, call.out, call.rows, *lengths, call.dropout, call.is_causal, *call.seeds


def _cudnn(call: Called) -> Args:
    return call.q, call.k, call.v, call.mask, True, call.dropout, call.is_causal


def _cudnn_backward(call: CalledBackward) -> Args:
    of_forward = call.out, call.rows, *call.seeds, call.mask, None, None, *call.lengths
    return call.grad, call.q, call.k, call.v, *of_forward, call.dropout, call.is_causal


KERNELS: Mapping[str, Attention] = {
    "efficient": Attention(
        aten._scaled_dot_product_efficient_attention.default,
        aten._scaled_dot_product_efficient_attention_backward.default,
        _efficient,
        _efficient_backward,
        (2, 3),
    ),
    "flash": Attention(
        aten._scaled_dot_product_flash_attention.default,
        aten._scaled_dot_product_flash_attention_backward.default,
        _flash,
        _flash_backward,
        (6, 7),
    ),
    "cudnn": Attention(
        aten._scaled_dot_product_cudnn_attention.default,
        aten._scaled_dot_product_cudnn_attention_backward.default,
        _cudnn,
        _cudnn_backward,
        (6, 7),
    ),
}
"""PyTorch takes flash attention for half precision without a mask, cuDNN's on newer GPUs, else the efficient one."""
