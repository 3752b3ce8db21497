"""Rules of kernels that only GPUs have: which dims are free, and what shapes and strides local results have."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from fxpar.ir.layout import Shard
from fxpar.rules.prove import prove
from fxpar.rules.rule import Strategy

aten = torch.ops.aten

SHAPE = (4, 4, 64, 16)


def _calls() -> Iterator[tuple[Any, tuple[Any, ...]]]:
    q, k, v, gradient = (_operand(*SHAPE) for _ in range(4))
    bias = _operand(4, 1, 64, 64).expand(4, 4, 64, 64)
    for causal in (False, True):
        yield from _flash(q, k, v, gradient, causal)
        yield from _efficient(q, k, v, gradient, bias, causal)
        yield from _cudnn(q, k, v, gradient, causal)
    x, weight = _operand(4, 64, 16), _operand(16)
    _, rstd = aten._fused_rms_norm.default(x, [16], weight, 1e-5)
    yield aten._fused_rms_norm_backward.default, (x, x, [16], rstd, weight, [True, True])


def _operand(*shape: int) -> Tensor:
    return torch.empty(shape, device="meta", dtype=torch.bfloat16)


def _flash(q: Tensor, k: Tensor, v: Tensor, gradient: Tensor, causal: bool) -> Iterator[tuple[Any, tuple[Any, ...]]]:
    forward = aten._scaled_dot_product_flash_attention.default
    backward = aten._scaled_dot_product_flash_attention_backward.default
    out, rows, cum_q, cum_k, max_q, max_k, seed, offset, _ = forward(q, k, v, 0.0, causal)
    yield forward, (q, k, v, 0.0, causal)
    yield backward, (gradient, q, k, v, out, rows, cum_q, cum_k, max_q, max_k, 0.0, causal, seed, offset)


def _efficient(
    q: Tensor, k: Tensor, v: Tensor, gradient: Tensor, bias: Tensor, causal: bool
) -> Iterator[tuple[Any, tuple[Any, ...]]]:
    forward = aten._scaled_dot_product_efficient_attention.default
    backward = aten._scaled_dot_product_efficient_attention_backward.default
    needed = [True, True, True, False]
    out, rows, seed, offset = forward(q, k, v, bias, True, 0.0, causal)
    yield forward, (q, k, v, bias, True, 0.0, causal)
    yield backward, (gradient, q, k, v, bias, out, rows, seed, offset, 0.0, needed, causal)


def _cudnn(q: Tensor, k: Tensor, v: Tensor, gradient: Tensor, causal: bool) -> Iterator[tuple[Any, tuple[Any, ...]]]:
    forward = aten._scaled_dot_product_cudnn_attention.default
    backward = aten._scaled_dot_product_cudnn_attention_backward.default
    out, rows, cum_q, cum_k, max_q, max_k, seed, offset, _ = forward(q, k, v, None, True, 0.0, causal)
    yield forward, (q, k, v, None, True, 0.0, causal)
    yield backward, (gradient, q, k, v, out, rows, seed, offset, None, cum_q, cum_k, max_q, max_k, 0.0, causal)


def test_batch_and_heads_are_free_and_local_results_fit() -> None:
    for target, args in _calls():
        for parts in (2, 4):
            proved = prove(target, args, {}, parts)
            assert _with_first_operand(proved, Shard(0, parts)), f"{target} cannot shard the batch"
            assert _with_first_operand(proved, Shard(1, parts)), f"{target} cannot shard its second dim"


def _with_first_operand(strategies: list[Strategy], shard: Shard) -> list[Strategy]:
    return [strategy for strategy in strategies if strategy.inputs[0] == shard]
