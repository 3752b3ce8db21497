"""What ops cost when one rank does all of them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.flop_counter import flop_registry

from fxpar.costs.dataflow import Operation, operations
from fxpar.costs.op_cost import flops_of, num_flops, work_us
from tests.layouts.laid_out import decomposed, prices
from tests.lowering.graphs import traced

aten = torch.ops.aten


class Attention(nn.Module):
    """A projection, its heads, and attention over them."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(16, 16))

    def forward(self, x: Tensor) -> Tensor:
        heads = (x @ self.weight).view(2, 8, 4, 4).transpose(1, 2)
        return functional.scaled_dot_product_attention(heads, heads, heads, is_causal=True)


def ops() -> list[Operation]:
    joint = decomposed(Attention(), torch.randn(2, 8, 16))
    return [op for op in operations(joint) if op.call is not None]


def test_matmuls_and_attention_are_counted_in_both_directions() -> None:
    flops = {op.node.name: num_flops(op) for op in ops()}
    by_kind = {kind: [n for name, n in flops.items() if kind in name] for kind in ("mm", "attention")}
    assert by_kind["mm"] == [2 * 16 * 16 * 16] * 2, "the product, and the gradient of its weight"
    forward = 2 * 2 * (2 * 4 * 8 * 8 * 4)
    assert sorted(by_kind["attention"]) == [forward, 2.5 * forward]


def test_views_are_free_and_other_ops_write_their_results() -> None:
    weighed = prices(flops_per_us=1e4)
    for op in ops():
        written = sum(value.num_bytes for value in op.results if value is not None)
        expected = 0.0 if op.is_view else num_flops(op) / 1e4 + written / weighed.memory_bytes_per_us
        assert work_us(op, weighed) == expected, op
    assert {op.node.name for op in ops() if op.is_view} >= {"view", "transpose"}


def test_grouped_matmuls_compute_each_row_with_one_matrix() -> None:
    import transformers.integrations.moe  # noqa: F401  registers its own

    ends = torch.tensor([2, 8], dtype=torch.int32)

    def train(rows: Tensor, weights: Tensor, gradient: Tensor, ends: Tensor) -> tuple[Tensor, ...]:
        both = torch.ops.transformers.grouped_mm_fallback_backward(rows, weights, ends, gradient)
        return (
            torch.ops.transformers.grouped_mm_fallback(rows, weights, ends),
            *both,
            torch._grouped_mm(rows, weights, offs=ends),
            torch._grouped_mm(rows.mT, gradient, offs=ends),
        )

    shapes = ((8, 8), (2, 8, 16), (8, 16))  # PyTorch's op takes rows of 16 bytes
    graph = traced(train, *(torch.randn(shape).bfloat16() for shape in shapes), ends)
    counts = [flops_of(node) for node in graph.graph.nodes if "grouped" in str(node.target)]
    product = 2 * 8 * 8 * 16
    assert sorted(counts) == [product, product, product, 2 * product]


def test_equal_calls_are_looked_up_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, ...]] = []
    count = flop_registry[aten.mm]

    def counted(left: Tensor, right: Tensor, *, out_val: Tensor) -> int:
        asked.append(tuple(left.shape))
        return int(count(left, right, out_val=out_val))

    monkeypatch.setitem(flop_registry, aten.mm, counted)
    given = torch.randn(3, 17), torch.randn(17, 5), torch.randn(7, 17)
    graph = traced(lambda left, right, other: (left @ right, left @ right, other @ right), *given)
    found = [flops_of(node) for node in graph.graph.nodes if node.op == "call_function"]
    assert found == [2 * 3 * 17 * 5, 2 * 3 * 17 * 5, 2 * 7 * 17 * 5]
    assert asked == [(3, 17), (7, 17)]
