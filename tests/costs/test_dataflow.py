"""A joint graph read as operations and values."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from fxpar.costs.dataflow import Border, Operation, Value, derived_from, operations, roots, small_constants
from fxpar.ir.stage import PortKind
from tests.layouts.laid_out import decomposed


class Masked(nn.Module):
    """A sorted value under a mask of positions, scaled."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(4))

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.arange(4, device=x.device) < 3
        noise = torch.rand(4, device=x.device)
        ordered, _ = (x * self.scale.exp().neg()).sort()
        return torch.where(mask, ordered.view(2, 2, 4), noise)


@pytest.fixture(scope="module")
def program() -> list[Operation]:
    return operations(decomposed(Masked(), torch.randn(4, 4), with_backward=False))


def by_name(program: list[Operation], name: str) -> Operation:
    return next(op for op in program if op.node.name == name)


def test_items_of_a_tuple_are_results_of_its_producer(program: list[Operation]) -> None:
    sort, view = by_name(program, "sort"), by_name(program, "view")
    assert sort.results == (Value(sort.node, 0), Value(sort.node, 1))
    assert view.operands == (Value(sort.node, 0),)
    assert not any("getitem" in op.node.name for op in program)


def test_ports_are_operations_at_the_border(program: list[Operation]) -> None:
    found = {(op.border, op.port.kind, len(op.operands), len(op.results)) for op in program if op.port}
    assert found == {
        (Border.INPUT, PortKind.INPUT, 0, 1),
        (Border.INPUT, PortKind.PARAMETER, 0, 1),
        (Border.OUTPUT, PortKind.RESULT, 1, 0),
    }


def test_a_view_looks_at_the_storage_of_its_operand(program: list[Operation]) -> None:
    root = roots(program)
    sort, view, neg = (by_name(program, name) for name in ("sort", "view", "neg"))
    assert root[Value(view.node)] == Value(sort.node)
    assert root[Value(neg.node)] == Value(neg.node)


def test_masks_are_small_constants_and_random_numbers_are_not(program: list[Operation]) -> None:
    assert {node.name for node in small_constants(program)} == {"arange", "lt"}


def test_what_is_computed_from_a_weight_alone_is_traced_to_it(program: list[Operation]) -> None:
    scale = next(op for op in program if str(op.port) == "parameter:scale")
    found = derived_from(program, {scale.node})
    assert {value.node.name for value in found} == {scale.node.name, "exp", "neg"}
    assert set(found.values()) == {(scale.port,)}
