"""Matmuls of ATen graphs: mm, bmm, addmm and baddbmm."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx

aten = torch.ops.aten

_PLAIN = {aten.mm.default, aten.bmm.default}
_WITH_BIAS = {aten.addmm.default, aten.baddbmm.default}


@dataclass(frozen=True, slots=True)
class Matmul:
    """`node` returns `left @ right + bias`, of two matrices or of two batches of them."""

    node: fx.Node
    left: fx.Node
    right: fx.Node
    bias: fx.Node | None = None


def matmul_at(node: fx.Node) -> Matmul | None:
    """The matmul at `node`; None if `node` is none, or scales its bias or product."""
    if node.target in _PLAIN:
        left, right = _tensors(node, 2)
        return Matmul(node, left, right)
    if node.target in _WITH_BIAS and all(node.kwargs.get(name, 1) == 1 for name in ("alpha", "beta")):
        bias, left, right = _tensors(node, 3)
        return Matmul(node, left, right, bias)
    return None


def _tensors(node: fx.Node, count: int) -> list[fx.Node]:
    """The first operands of `node`."""
    found = [operand for operand in node.args[:count] if isinstance(operand, fx.Node)]
    assert len(found) == count, f"{node} takes no {count} tensors"
    return found
