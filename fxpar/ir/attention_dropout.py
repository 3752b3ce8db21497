"""Compute attention with dropout by its definition: fused kernels would draw their own random numbers."""

from __future__ import annotations

from typing import Any

from torch import Tensor, fx
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

_DROPOUT_P = 4
"""The position of `dropout_p` among the arguments."""


def define_attention_dropout(module: fx.GraphModule) -> None:
    """Let every attention with dropout in `module`, a graph from Dynamo, be traced by its definition.

    Before: `scaled_dot_product_attention(q, k, v, dropout_p=0.1)`; on CUDA, a kernel with a mask that only it knows
    After:  `attention_by_definition(q, k, v, dropout_p=0.1)`: products, a softmax, and a dropout by logical index
    """
    for node in module.graph.find_nodes(op="call_function", target=F.scaled_dot_product_attention):
        dropout = node.args[_DROPOUT_P] if len(node.args) > _DROPOUT_P else node.kwargs.get("dropout_p", 0.0)
        if dropout != 0.0:
            node.target = attention_by_definition
    module.recompile()


def attention_by_definition(*args: Any, **kwargs: Any) -> Tensor:
    """As `scaled_dot_product_attention`, without a fused kernel."""
    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(*args, **kwargs)
