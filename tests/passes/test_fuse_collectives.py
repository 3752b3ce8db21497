"""Every way in which a collective and a matmul become one op: what the graph is then, and that it returns the same."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import fx

from fxpar.dump import format_graph
from fxpar.graph.graph_writer import aten
from tests.passes.fusing import (
    Local,
    Write,
    check_same,
    communications,
    compare,
    fuse_always,
    modules_of,
    ops_of,
)
from tests.support.fake_mesh import fake_mesh

c10d = torch.ops._c10d_functional


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


@pytest.mark.parametrize("write", GATHERS, ids=lambda write: write.__name__)
def test_a_gather_and_its_matmuls_become_one_op_without_copies(write: Write) -> None:
    with fake_mesh(x=2) as mesh:
        compared = compare(write, mesh)
    check_same(compared, bitwise=write not in OTHER_ROUNDING)
    (op,) = communications(compared.fused.module)
    assert op.target is torch.ops.fxpar.all_gather_matmul.default
    assert op.args[3] == GATHERS[write]
    assert not op.args[6], "the gathered value itself is not wanted"
    copies = ["clone"] if write is matrices_on_the_right else []  # the product comes transposed
    assert ops_of(compared.fused.module) == ["all_gather_matmul", *copies]


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


@pytest.mark.parametrize("write", KEPT, ids=lambda write: write.__name__)
def test_what_else_wants_the_gathered_value_has_it_from_the_op(write: Write) -> None:
    with fake_mesh(x=2) as mesh:
        compared = compare(write, mesh)
    check_same(compared)
    (op,) = communications(compared.fused.module)
    assert op.args[3] == "rows" and len(op.args[1]) == 1 and op.args[6]
    assert "clone" not in ops_of(compared.fused.module)


def test_a_backward_of_a_split_sequence_before_and_after() -> None:
    with fake_mesh(x=2) as mesh:
        (before, _) = modules_of(gradients_of_a_sharded_sequence, mesh)
        (after, *_) = fuse_always([before], mesh)
        group = mesh.group("x").group_name
    texts = [format_graph(module).replace(f"'{group}'", "GROUP") for module in (before, after.module)]
    calls = ["\n".join(line.strip() for line in text.splitlines() if " = " in line) for text in texts]
    assert (
        calls[0]
        == """\
all_gather_into_tensor: f64[4, 3, 5] = _c10d_functional.all_gather_into_tensor(given_0, 2, GROUP)  # over x, 480 bytes
wait_tensor: f64[4, 3, 5] = _c10d_functional.wait_tensor(all_gather_into_tensor)
view: f64[2, 2, 1, 3, 5] = aten.view(wait_tensor, [2, 2, 1, 3, 5])
permute: f64[2, 1, 2, 3, 5] = aten.permute(view, [1, 2, 0, 3, 4])
clone: f64[2, 1, 2, 3, 5] = aten.clone(permute, memory_format=torch.contiguous_format)
view_1: f64[2, 6, 5] = aten.view(clone, [2, 6, 5])
view_2: f64[12, 5] = aten.view(view_1, [12, 5])
t: f64[5, 12] = aten.t(view_2)
mm: f64[5, 4] = aten.mm(t, given_1)
mm_1: f64[12, 4] = aten.mm(view_2, given_2)
t_1: f64[4, 5] = aten.t(mm)
sum_1: f64[5] = aten.sum.dim_IntList(view_1, [0, 1])"""
    )
    assert (
        calls[1]
        == """\
view_3: f64[6, 5] = aten.view(given_0, [6, 5])
all_gather_matmul: (f64[12, 4], f64[12, 5],) = fxpar.all_gather_matmul(\
view_3, [given_2], [None], 'rows', 2, 2, True, GROUP)  # over x, 480 bytes
getitem: f64[12, 4] = all_gather_matmul[0]
getitem_1: f64[12, 5] = all_gather_matmul[1]
view_4: f64[2, 6, 5] = aten.view(getitem_1, [2, 6, 5])
permute_1: f64[5, 12] = aten.permute(getitem_1, [1, 0])
mm: f64[5, 4] = aten.mm(permute_1, given_1)
t_1: f64[4, 5] = aten.t(mm)
sum_1: f64[5] = aten.sum.dim_IntList(view_4, [0, 1])"""
    )
    assert "# forward: 1 all_gather within all_gather_matmul over x, 480 bytes together" in texts[1]


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


@pytest.mark.parametrize("write", SCATTERS, ids=lambda write: write.__name__)
def test_a_matmul_and_the_scattered_sum_of_it_become_one_op(write: Write) -> None:
    with fake_mesh(x=2) as mesh:
        compared = compare(write, mesh)
    check_same(compared, bitwise=write not in OTHER_ROUNDING)
    (op,) = communications(compared.fused.module)
    assert op.target is torch.ops.fxpar.matmul_reduce_scatter.default
    assert op.args[3] == SCATTERS[write]


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


@pytest.mark.parametrize("write", REDUCTIONS, ids=lambda write: write.__name__)
def test_a_matmul_and_the_sum_of_it_over_ranks_become_one_op(write: Write) -> None:
    with fake_mesh(x=3) as mesh:
        compared = compare(write, mesh)
    check_same(compared, bitwise=write not in OTHER_ROUNDING)
    (op,) = communications(compared.fused.module)
    assert op.target is torch.ops.fxpar.matmul_all_reduce.default


def gathered_without_a_matmul(local: Local) -> Sequence[fx.Node]:
    return [local.call(aten.relu.default, local.gathered(local.given(3, 4), 0))]


def gathered_twice_in_one_matmul(local: Local) -> Sequence[fx.Node]:
    whole = local.gathered(local.given(3, 4), 0)
    return [local.call(aten.mm.default, whole, local.call(aten.t.default, whole))]


def gathered_for_a_sum_of_all_ranks(local: Local) -> Sequence[fx.Node]:
    x, w = local.same(3, 8), local.given(4, 5)
    return [local.alike(local.call(aten.mm.default, x, local.gathered(w, 0, outer=2)))]


def gathered_of_ragged_pieces(local: Local) -> Sequence[fx.Node]:
    x, w = local.given(3, 4), local.given(4, 5)
    return [local.call(aten.mm.default, local.gathered(x, 0, size=5), w)]


def reduced_to_a_maximum(local: Local) -> Sequence[fx.Node]:
    x, w = local.given(6, 4), local.given(4, 5)
    return [local.reduced(local.call(aten.mm.default, x, w), "max")]


def reduced_in_another_dtype(local: Local) -> Sequence[fx.Node]:
    x, w = local.given(6, 4), local.given(4, 5)
    return [local.reduced(local.call(aten._to_copy.default, local.call(aten.mm.default, x, w), dtype=torch.float32))]


def reduced_and_used_as_it_is(local: Local) -> Sequence[fx.Node]:
    x, w = local.given(6, 4), local.given(4, 5)
    product = local.call(aten.mm.default, x, w)
    return [local.reduced(product), local.call(aten.relu.default, product)]


def scattered_in_ragged_pieces(local: Local) -> Sequence[fx.Node]:
    x, w = local.given(5, 4), local.given(4, 5)
    return [local.scattered(local.call(aten.mm.default, x, w), 0)]


def reduced_without_a_matmul(local: Local) -> Sequence[fx.Node]:
    return [local.reduced(local.call(aten.sum.dim_IntList, local.given(6, 4), [0]))]


def scattered_behind_a_gather(local: Local) -> Sequence[fx.Node]:
    """One matmul between two collectives goes with the first of them."""
    x, w = local.given(3, 4), local.given(4, 5)
    return [local.scattered(local.call(aten.mm.default, local.gathered(x, 0), w), 0)]


# Where a kernel adds a bias before it rounds, or takes a matrix that lies in memory otherwise.
OTHER_ROUNDING = {rows_with_a_bias, columns_of_a_digit, scattered_with_a_bias, reduced_with_a_bias}

LEFT = {
    gathered_without_a_matmul: "no matmul takes it, but relu",
    gathered_twice_in_one_matmul: "mm multiplies it with what is made of it",
    gathered_for_a_sum_of_all_ranks: "all ranks compute mm, and must come to the same bits",
    gathered_of_ragged_pieces: "it is cut up or to size before anything takes it",
    reduced_to_a_maximum: "it reduces by max",
    reduced_in_another_dtype: "_to_copy makes torch.float32 of the terms before they are summed",
    reduced_and_used_as_it_is: "what mm returns is used as it is, too",
    scattered_in_ragged_pieces: "no matmul produces it, but constant_pad_nd",
    reduced_without_a_matmul: "no matmul produces it, but sum_1",
    scattered_behind_a_gather: "its matmul is part of all_gather_matmul",
}


@pytest.mark.parametrize("write", LEFT, ids=lambda write: write.__name__)
def test_what_is_left_has_a_reason(write: Write) -> None:
    with fake_mesh(x=2) as mesh:
        compared = compare(write, mesh)
    check_same(compared)
    left = [verdict for verdict in compared.fused.verdicts if verdict.fused is None]
    assert [verdict.reason for verdict in left] == [LEFT[write]]
