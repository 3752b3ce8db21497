"""Matmuls of odd sizes are padded for GPUs, and compute what they did."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, fx

pytest.importorskip("triton")

from fxpar._torch.compiler import FakeTensorMode, make_fx
from fxpar._torch.pad_matmuls import pad_matmuls
from tests.cuda.pretend import pretended_gpus

aten = torch.ops.aten
SIZES = [(12, 24), (24, 97), (97,), (3, 5, 24), (3, 24, 7)]


def products(x: Tensor, weight: Tensor, bias: Tensor, rows: Tensor, columns: Tensor) -> tuple[Tensor, ...]:
    logits = aten.mm(x, weight)
    return logits, aten.addmm(bias, x, weight, beta=0.5, alpha=2.0), aten.bmm(rows, columns), aten.mm(logits.T, x)


def traced(device: str) -> fx.GraphModule:
    with FakeTensorMode(), pretended_gpus():
        module: fx.GraphModule = make_fx(products)(
            *(torch.empty(size, dtype=torch.bfloat16, device=device) for size in SIZES)
        )
        with torch._inductor.config.patch(shape_padding=True, force_shape_pad=True):  # there is nothing to time on
            pad_matmuls(module)
    return module


def matmuls(module: fx.GraphModule) -> list[list[tuple[int, ...]]]:
    """The shapes of the operands of all matmuls."""
    matmuls = (aten.mm.default, aten.addmm.default, aten.bmm.default)
    calls = [node for node in module.graph.nodes if node.target in matmuls]
    return [[tuple(operand.meta["val"].shape) for operand in node.all_input_nodes] for node in calls]


def test_sizes_become_multiples_of_what_tensor_cores_take() -> None:
    assert matmuls(traced("cuda:0")) == [
        [(16, 24), (24, 104)],
        [(104,), (16, 24), (24, 104)],
        [(3, 8, 24), (3, 24, 8)],
        [(104, 16), (16, 24)],
    ]


def test_padded_products_are_what_they_were() -> None:
    module = traced("cuda:0")
    torch.manual_seed(0)
    given = [torch.randn(size, dtype=torch.float64) for size in SIZES]
    for found, expected in zip(module(*given), products(*given), strict=True):
        torch.testing.assert_close(found, expected)


def test_nothing_is_padded_for_cpus() -> None:
    assert all(size % 8 for size in matmuls(traced("cpu"))[0][1][1:])
