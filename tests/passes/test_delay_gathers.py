"""What every rank can compute of its own piece is computed before the gather, and a matmul comes right behind it."""

from __future__ import annotations

import operator
from collections.abc import Sequence

import pytest
import torch
from torch import fx

from fxpar.passes.delay_gathers import delay_gathers
from fxpar.passes.local_graph import aten
from tests.fake_mesh import fake_mesh
from tests.lockstep import run_ranks_in_lockstep
from tests.passes.fusing import Local, Write, fuse_always, modules_of, ops_of, random_inputs


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
def test_gathers_go_behind_what_ranks_compute_for_themselves(write: Write) -> None:
    with fake_mesh(x=2) as mesh:
        before = modules_of(write, mesh)
        delayed = [delay_gathers(module) for module in before]
        after = [fuse_always(module, mesh) for module in delayed]
        inputs = [random_inputs(module, rank) for rank, module in enumerate(before)]
        expected = run_ranks_in_lockstep([module.graph for module in before], inputs, mesh)
        found = run_ranks_in_lockstep([module.graph for module in delayed], inputs, mesh)
        fused = run_ranks_in_lockstep([each.module.graph for each in after], inputs, mesh)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    torch.testing.assert_close(fused, expected)
    assert after[0].verdicts[0].fused is not None
    assert ops_of(delayed[0])[0] != "all_gather_into_tensor"


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
def test_gathers_stay_in_front_of_all_else(write: Write) -> None:
    with fake_mesh(x=2) as mesh:
        before, _ = modules_of(write, mesh)
        assert delay_gathers(before) is before
