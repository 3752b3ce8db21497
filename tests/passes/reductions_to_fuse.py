"""Local graphs of matmuls in all their forms whose result is summed over ranks, and scattered or not."""

from __future__ import annotations

from collections.abc import Sequence

from torch import fx

from fxpar.graph.graph_writer import aten
from tests.passes.fusing import Local


def scattered_rows(local: Local) -> Sequence[fx.Node]:
    x, w = local.given(6, 4), local.given(4, 5)
    return [local.scattered(local.call(aten.mm.default, x, w), 0)]


def scattered_rows_and_a_residual(local: Local) -> Sequence[fx.Node]:
    """The end of an attention or an MLP whose sequence is sharded."""
    x, w, residual = local.given(12, 4), local.given(4, 5), local.given(2, 3, 5)
    product = local.call(aten.view.default, local.call(aten.mm.default, x, w), [2, 6, 5])
    return [local.call(aten.add.Tensor, local.scattered(product, 1), residual)]


def scattered_columns(local: Local) -> Sequence[fx.Node]:
    x, w = local.given(12, 4), local.given(4, 6)
    product = local.call(aten.view.default, local.call(aten.mm.default, x, w), [2, 6, 6])
    return [local.scattered(product, 2)]


def scattered_digit_of_columns(local: Local) -> Sequence[fx.Node]:
    x, w = local.given(3, 4), local.given(4, 12)
    return [local.scattered(local.call(aten.mm.default, x, w), 1, outer=3)]


def scattered_with_a_bias(local: Local) -> Sequence[fx.Node]:
    x, w, b = local.given(6, 4), local.given(4, 5), local.given(5)
    return [local.scattered(local.call(aten.addmm.default, b, x, w), 0)]


def scattered_sum_of_products(local: Local) -> Sequence[fx.Node]:
    """The gradient of what queries, keys and values are made of."""
    x, v, w, y = local.given(12, 4), local.given(4, 5), local.given(4, 5), local.given(12, 4)
    one, other = (
        local.call(aten.view.default, local.call(aten.mm.default, a, b), [2, 6, 5]) for a, b in ((x, v), (y, w))
    )
    return [local.scattered(local.call(aten.add.Tensor, one, other), 1)]


def scattered_matrices(local: Local) -> Sequence[fx.Node]:
    a, b = local.given(4, 3, 4), local.given(4, 4, 5)
    return [local.scattered(local.call(aten.bmm.default, a, b), 0)]


def scattered_rows_of_matrices(local: Local) -> Sequence[fx.Node]:
    a, b = local.given(2, 6, 4), local.given(2, 4, 5)
    return [local.scattered(local.call(aten.bmm.default, a, b), 1)]


def scattered_transposed_product(local: Local) -> Sequence[fx.Node]:
    """The gradient of a weight, whose product is transposed before its rows are scattered."""
    x, dy = local.given(6, 4), local.given(6, 8)
    product = local.call(aten.mm.default, local.call(aten.t.default, x), dy)
    return [local.scattered(local.call(aten.t.default, product), 0)]


SCATTERS = {
    scattered_rows: "rows",
    scattered_rows_and_a_residual: "rows",
    scattered_columns: "columns",
    scattered_digit_of_columns: "columns",
    scattered_with_a_bias: "rows",
    scattered_sum_of_products: "rows",
    scattered_matrices: "matrices",
    scattered_rows_of_matrices: "rows",
    scattered_transposed_product: "columns",
}


def reduced(local: Local) -> Sequence[fx.Node]:
    x, w = local.given(12, 4), local.given(4, 5)
    product = local.call(aten.view.default, local.call(aten.mm.default, x, w), [2, 6, 5])
    return [local.reduced(product)]


def reduced_with_a_bias(local: Local) -> Sequence[fx.Node]:
    x, w, b = local.given(6, 4), local.given(4, 5), local.given(5)
    return [local.reduced(local.call(aten.addmm.default, b, x, w))]


def reduced_sum_of_products(local: Local) -> Sequence[fx.Node]:
    x, v, w = local.given(6, 4), local.given(4, 5), local.given(4, 5)
    one, other, third = (local.call(aten.mm.default, x, weight) for weight in (v, w, v))
    return [local.reduced(local.call(aten.add.Tensor, local.call(aten.add.Tensor, one, other), third))]


def reduced_matrices(local: Local) -> Sequence[fx.Node]:
    a, b = local.given(4, 3, 4), local.given(4, 4, 5)
    return [local.reduced(local.call(aten.transpose.int, local.call(aten.bmm.default, a, b), 0, 1))]


REDUCTIONS = [reduced, reduced_with_a_bias, reduced_sum_of_products, reduced_matrices]
