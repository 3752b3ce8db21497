"""How long an operation takes when one rank does all of it."""

from __future__ import annotations

import torch
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from fxpar import annotate
from fxpar.layouts.dataflow import Operation
from fxpar.planner.prices import Prices

aten = torch.ops.aten


def work_us(operation: Operation, prices: Prices) -> float:
    """The time of the arithmetic of an op, and of writing its results once; nothing for views and ports."""
    if operation.call is None or operation.is_view:
        return 0.0
    written = sum(result.num_bytes for result in operation.results if result is not None)
    dtype = next((result.tensor.dtype for result in operation.results if result is not None), torch.float32)
    return prices.arithmetic_us(num_flops(operation), dtype) + written / prices.memory_bytes_per_us


def num_flops(operation: Operation) -> float:
    """Floating-point operations of a matmul, convolution or attention; 0 of what memory bounds."""
    call = operation.call
    if call is None or not isinstance(call.target, torch._ops.OpOverload):
        return 0.0
    match call.target.overloadpacket:
        # Attention on CPUs, which PyTorch's registry leaves out.
        case aten._scaled_dot_product_flash_attention_for_cpu:
            return float(sdpa_flop_count(*call.inputs[:3]))
        case aten._scaled_dot_product_flash_attention_for_cpu_backward:
            return float(sdpa_backward_flop_count(*call.inputs[:4]))
        case packet if packet in flop_registry:
            args, kwargs = torch.fx.map_arg((call.args, call.kwargs), annotate.value)
            return float(flop_registry[packet](*args, **kwargs, out_val=annotate.value(operation.node)))
    return 0.0
