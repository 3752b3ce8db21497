"""Local graphs of a gather and what takes it: matmuls in all their forms, alone and beside others, or none."""

from __future__ import annotations

from collections.abc import Sequence

from torch import fx

from fxpar.graph.graph_writer import aten
from tests.passes.fusing import Local


def rows(local: Local) -> Sequence[fx.Node]:
    x, w = local.given(3, 4), local.given(4, 5)
    return [local.call(aten.mm.default, local.gathered(x, 0), w)]


def rows_with_a_bias(local: Local) -> Sequence[fx.Node]:
    x, w, b = local.given(3, 4), local.given(4, 5), local.given(5)
    return [local.call(aten.addmm.default, b, local.gathered(x, 0), w)]


def rows_in_the_middle(local: Local) -> Sequence[fx.Node]:
    """The sequence of [batch, sequence, hidden]."""
    x, w = local.given(2, 3, 4), local.given(5, 4)
    flat = local.call(aten.view.default, local.gathered(x, 1), [12, 4])
    product = local.call(aten.mm.default, flat, local.call(aten.t.default, w))
    return [local.call(aten.view.default, product, [2, 6, 5])]


def two_matmuls_of_one_gather(local: Local) -> Sequence[fx.Node]:
    x, v, w = local.given(2, 3, 4), local.given(4, 5), local.given(4, 3)
    flat = local.call(aten.view.default, local.gathered(x, 1), [12, 4])
    return [local.call(aten.mm.default, flat, other) for other in (v, w)]


def columns(local: Local) -> Sequence[fx.Node]:
    """A weight in shards of its output dim, whole where it is used."""
    x, w = local.given(3, 4), local.given(5, 4)
    return [local.call(aten.mm.default, x, local.call(aten.t.default, local.gathered(w, 0)))]


def columns_of_a_digit(local: Local) -> Sequence[fx.Node]:
    x, w = local.given(3, 4), local.given(4, 6)
    return [local.call(aten.mm.default, x, local.gathered(w, 1, outer=3))]


def sum_on_the_right(local: Local) -> Sequence[fx.Node]:
    x, w = local.given(3, 8), local.given(4, 5)
    return [local.call(aten.mm.default, x, local.gathered(w, 0, outer=2))]


def sum_on_the_left(local: Local) -> Sequence[fx.Node]:
    """The gradient of a weight: both activations over the whole sequence."""
    dy, x = local.given(2, 3, 5), local.given(12, 4)
    flat = local.call(aten.view.default, local.gathered(dy, 1), [12, 5])
    return [local.call(aten.mm.default, local.call(aten.t.default, flat), x)]


def rows_of_columns(local: Local) -> Sequence[fx.Node]:
    """Gathered along the last dim, which is contracted."""
    x, w = local.given(2, 3, 4), local.given(8, 5)
    flat = local.call(aten.view.default, local.gathered(x, 2), [6, 8])
    return [local.call(aten.mm.default, flat, w)]


def matrices(local: Local) -> Sequence[fx.Node]:
    a, b = local.given(2, 3, 4), local.given(4, 4, 5)
    return [local.call(aten.bmm.default, local.gathered(a, 0), b)]


def matrices_on_the_right(local: Local) -> Sequence[fx.Node]:
    """Weights of several experts."""
    a, b = local.given(4, 3, 4), local.given(2, 4, 5)
    return [local.call(aten.bmm.default, a, local.gathered(b, 0))]


def rows_of_matrices(local: Local) -> Sequence[fx.Node]:
    a, b, c = local.given(2, 3, 4), local.given(2, 4, 5), local.given(2, 6, 5)
    return [local.call(aten.baddbmm.default, c, local.gathered(a, 1), b)]


def gathered_in_memory_order(local: Local) -> Sequence[fx.Node]:
    """What is gathered lies transposed in memory."""
    x, w = local.given(4, 3), local.given(4, 5)
    return [local.call(aten.mm.default, local.gathered(local.call(aten.t.default, x), 0), w)]


GATHERS = {
    rows: "rows",
    rows_with_a_bias: "rows",
    rows_in_the_middle: "rows",
    two_matmuls_of_one_gather: "rows",
    columns: "columns",
    columns_of_a_digit: "columns",
    sum_on_the_right: "sum_right",
    sum_on_the_left: "sum_left",
    rows_of_columns: "sum_left",
    matrices: "matrices",
    matrices_on_the_right: "matrices",
    rows_of_matrices: "rows",
    gathered_in_memory_order: "rows",
}


def gradients_of_a_sharded_sequence(local: Local) -> Sequence[fx.Node]:
    """Megatron's backward: the gathered gradient returns that of the input, of the weight and of the bias."""
    dy, x, w = local.given(2, 3, 5), local.given(12, 4), local.given(5, 4)
    whole = local.gathered(dy, 1)
    flat = local.call(aten.view.default, whole, [12, 5])
    dw = local.call(aten.mm.default, local.call(aten.t.default, flat), x)
    dx = local.call(aten.mm.default, flat, w)
    return [dx, local.call(aten.t.default, dw), local.call(aten.sum.dim_IntList, whole, [0, 1])]


def gathered_for_others_too(local: Local) -> Sequence[fx.Node]:
    """Others want it whole, in several shapes, and as a result."""
    x, w = local.given(2, 3, 4), local.given(4, 5)
    whole = local.gathered(x, 1)
    flat = local.call(aten.view.default, whole, [12, 4])
    product = local.call(aten.mm.default, flat, w)
    turned = local.call(aten.permute.default, whole, [1, 0, 2])
    return [whole, product, local.call(aten.relu.default, turned), local.call(aten.relu.default, flat)]


KEPT = [gradients_of_a_sharded_sequence, gathered_for_others_too]


def gathered_without_a_matmul(local: Local) -> Sequence[fx.Node]:
    return [local.call(aten.relu.default, local.gathered(local.given(3, 4), 0))]
