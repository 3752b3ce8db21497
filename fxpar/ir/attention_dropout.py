"""Compute attention with dropout by its definition: fused kernels would draw their own random numbers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
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
    """As `scaled_dot_product_attention`, without a fused kernel.

    In half precision the products are those of tensor cores, as in models that write them out, and not of float32,
    which on GPUs take ten times as long.
    """
    with sdpa_kernel(SDPBackend.MATH), _products_in_half_precision():
        return F.scaled_dot_product_attention(*args, **kwargs)


@contextmanager
def _products_in_half_precision() -> Iterator[None]:
    before = torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed()
    torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(True)
    try:
        yield
    finally:
        torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(before)
