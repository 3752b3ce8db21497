"""What every rank can compute of its own piece is computed before it is gathered, so that matmuls take that."""

from __future__ import annotations

import operator
from collections.abc import Sequence

import pytest
import torch
from torch import fx

from fxpar.graph.graph_writer import aten
from tests.passes.fusing import Local, Write, check_same, communications, compare
from tests.support.fake_mesh import fake_mesh


def a_cast(local: Local) -> Sequence[fx.Node]:
    x, w = local.given(3, 4), local.given(4, 5)
    half = local.call(aten._to_copy.default, w, dtype=torch.float)
    return [
        local.call(aten.mm.default, local.call(aten._to_copy.default, local.gathered(x, 0), dtype=torch.float), half)
    ]


def a_pointwise_chain(local: Local) -> Sequence[fx.Node]:
    """A scale over what is not gathered, and a view in between."""
    x, scale, w = local.given(2, 3, 4), local.same(4), local.given(4, 5)
    scaled = local.call(aten.mul.Tensor, local.call(aten.relu.default, local.gathered(x, 1)), scale)
    return [local.call(aten.mm.default, local.call(aten.view.default, scaled, [12, 4]), w)]


def a_norm_in_parts(local: Local) -> Sequence[fx.Node]:
    """Llama's: the gathered value is used twice on the way."""
    x, w = local.given(2, 3, 4), local.given(4, 5)
    whole = local.gathered(x, 1)
    mean = local.call(aten.mean.dim, local.call(aten.pow.Tensor_Scalar, whole, 2), [-1], True)
    scale = local.call(aten.rsqrt.default, local.call(aten.add.Tensor, mean, 1e-6))
    normed = local.call(aten.mul.Tensor, whole, scale)
    return [local.call(aten.mm.default, local.call(aten.view.default, normed, [12, 4]), w)]


def a_whole_norm(local: Local) -> Sequence[fx.Node]:
    x, scale, shift, w = local.given(2, 3, 4), local.same(4), local.same(4), local.given(4, 5)
    norm = local.call(aten.native_layer_norm.default, local.gathered(x, 1), [4], scale, shift, 1e-5)
    normed = local.call(operator.getitem, norm, 0)
    return [local.call(aten.mm.default, local.call(aten.view.default, normed, [12, 4]), w)]


def a_weight_used_by_several(local: Local) -> Sequence[fx.Node]:
    x, w = local.given(3, 4), local.given(5, 4)
    whole = local.call(aten.t.default, local.call(aten.abs.default, local.gathered(w, 0)))
    return [local.call(aten.mm.default, x, whole), local.call(aten.mm.default, x, local.call(aten.relu.default, whole))]


@pytest.mark.parametrize("write", [a_cast, a_pointwise_chain, a_norm_in_parts, a_whole_norm, a_weight_used_by_several])
def test_ranks_compute_on_their_pieces_what_they_can(write: Write) -> None:
    with fake_mesh(x=2) as mesh:
        compared = compare(write, mesh)
    check_same(compared)
    (verdict,) = compared.fused.verdicts
    assert verdict.fused is not None and "on every rank's piece" in verdict.reason
    (op,) = communications(compared.fused.module)
    assert op.target is torch.ops.fxpar.all_gather_matmul.default


def a_widening_cast(local: Local) -> Sequence[fx.Node]:
    x, w = local.given(3, 4), local.given(4, 5)
    half = local.call(aten._to_copy.default, x, dtype=torch.float)
    return [
        local.call(aten.mm.default, local.call(aten._to_copy.default, local.gathered(half, 0), dtype=torch.double), w)
    ]


def a_value_used_before(local: Local) -> Sequence[fx.Node]:
    x, w = local.given(3, 4), local.given(4, 5)
    whole = local.gathered(x, 0)
    return [whole, local.call(aten.mm.default, local.call(aten.relu.default, whole), w)]


def a_sum_over_what_is_gathered(local: Local) -> Sequence[fx.Node]:
    x, w = local.given(3, 4), local.given(4, 5)
    whole = local.gathered(x, 0)
    centered = local.call(aten.sub.Tensor, whole, local.call(aten.mean.dim, whole, [0], True))
    return [local.call(aten.mm.default, centered, w)]


def what_differs_between_pieces(local: Local) -> Sequence[fx.Node]:
    x, positions, w = local.given(3, 4), local.same(6, 4), local.given(4, 5)
    return [local.call(aten.mm.default, local.call(aten.add.Tensor, local.gathered(x, 0), positions), w)]


def what_differs_between_ranks(local: Local) -> Sequence[fx.Node]:
    x, scale, w = local.given(3, 4), local.given(4), local.given(4, 5)
    return [local.call(aten.mm.default, local.call(aten.mul.Tensor, local.gathered(x, 0), scale), w)]


STAYING = [
    a_widening_cast,
    a_value_used_before,
    a_sum_over_what_is_gathered,
    what_differs_between_pieces,
    what_differs_between_ranks,
]


@pytest.mark.parametrize("write", STAYING, ids=lambda write: write.__name__)
def test_all_else_is_computed_of_the_gathered_value(write: Write) -> None:
    with fake_mesh(x=2) as mesh:
        compared = compare(write, mesh)
    check_same(compared)
    (verdict,) = compared.fused.verdicts
    assert verdict.fused is None
