"""The time of an operation that one rank runs as a whole."""

from __future__ import annotations

import math
from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor, fx

from fxpar._torch.flops import flop_registry, sdpa_backward_flop_count, sdpa_flop_count
from fxpar.costs.dataflow import Operation
from fxpar.costs.prices import Prices
from fxpar.ir import node_meta
from fxpar.ir.flex_attention import FlexCall
from fxpar.rules.call import op_call

aten = torch.ops.aten

_GROUPED_MATMULS = {
    "aten::_grouped_mm": 1,
    "transformers::grouped_mm_fallback": 1,
    "transformers::grouped_mm_fallback_backward": 2,
}
"""How many products of all rows, each with the matrix of its group, these ops compute."""


def work_us(operation: Operation, prices: Prices) -> float:
    """The time of an op's arithmetic plus that of writing its results once; 0 for views and ports."""
    if operation.call is None or operation.is_view:
        return 0.0
    written = sum(result.num_bytes for result in operation.results if result is not None)
    dtype = next((result.tensor.dtype for result in operation.results if result is not None), torch.float32)
    return prices.arithmetic_us(num_flops(operation), dtype) + written / prices.memory_bytes_per_us


def num_flops(operation: Operation) -> float:
    """Floating-point operations of a matmul, convolution or attention; 0 for memory-bound ops."""
    return 0.0 if operation.call is None else flops_of(operation.node)


def flops_of(node: fx.Node) -> float:
    """`num_flops` of a traced call, in logical or local shapes."""
    if isinstance(node.target, FlexCall):  # of all blocks, since how many are masked is known only when it runs
        query, key, value = op_call(node).inputs[:3]
        is_forward = node.target.kind == "forward"
        return float(
            sdpa_flop_count(query, key, value) if is_forward else sdpa_backward_flop_count(query, query, key, value)
        )
    if not isinstance(node.target, torch._ops.OpOverload):
        return 0.0
    match node.target.overloadpacket:
        # PyTorch's registry lacks the CPU kernels of attention.
        case aten._scaled_dot_product_flash_attention_for_cpu:
            return float(sdpa_flop_count(*op_call(node).inputs[:3]))
        case aten._scaled_dot_product_flash_attention_for_cpu_backward:
            return float(sdpa_backward_flop_count(*op_call(node).inputs[:4]))
        case packet if packet in flop_registry:
            return _registered_flops(node, packet)
    if node.target.name() in _GROUPED_MATMULS:
        left, right, *_ = op_call(node).inputs
        return 2.0 * _GROUPED_MATMULS[node.target.name()] * math.prod(left) * right[-1]
    return 0.0


_known: dict[Hashable, float] = {}
"""What PyTorch's registry has said, by op and shapes."""


def _registered_flops(node: fx.Node, packet: Any) -> float:
    """What PyTorch's registry says of a call; asked once for its shapes, since layers make the same calls."""
    given = fx.map_arg((node.args, node.kwargs), lambda operand: _shapes(node_meta.value(operand)))
    call = packet, given, _shapes(node_meta.value(node))
    if call not in _known:
        args, kwargs = fx.map_arg((node.args, node.kwargs), node_meta.value)
        _known[call] = float(flop_registry[packet](*args, **kwargs, out_val=node_meta.value(node)))
    return _known[call]


def _shapes(found: Any) -> Any:
    """The shape of a tensor, or of each of several."""
    if isinstance(found, tuple | list):
        return tuple(map(_shapes, found))
    return found.shape if isinstance(found, Tensor) else found
