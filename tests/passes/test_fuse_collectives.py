"""Every way in which a collective and a matmul become one op: what the graph is then, and that it returns the same."""

from __future__ import annotations

import pytest
import torch

from fxpar.dump import format_graph
from tests.passes.fusing import Write, check_same, communications, compare, fuse_always, modules_of, ops_of
from tests.passes.gathers_to_fuse import (
    GATHERS,
    KEPT,
    columns_of_a_digit,
    gradients_of_a_sharded_sequence,
    matrices_on_the_right,
    rows_with_a_bias,
)
from tests.passes.reductions_to_fuse import REDUCTIONS, SCATTERS, reduced_with_a_bias, scattered_with_a_bias
from tests.support.fake_mesh import fake_mesh

# Where a kernel adds a bias before it rounds, or takes a matrix that lies in memory otherwise.
OTHER_ROUNDING = {rows_with_a_bias, columns_of_a_digit, scattered_with_a_bias, reduced_with_a_bias}


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


@pytest.mark.parametrize("write", SCATTERS, ids=lambda write: write.__name__)
def test_a_matmul_and_the_scattered_sum_of_it_become_one_op(write: Write) -> None:
    with fake_mesh(x=2) as mesh:
        compared = compare(write, mesh)
    check_same(compared, bitwise=write not in OTHER_ROUNDING)
    (op,) = communications(compared.fused.module)
    assert op.target is torch.ops.fxpar.matmul_reduce_scatter.default
    assert op.args[3] == SCATTERS[write]


@pytest.mark.parametrize("write", REDUCTIONS, ids=lambda write: write.__name__)
def test_a_matmul_and_the_sum_of_it_over_ranks_become_one_op(write: Write) -> None:
    with fake_mesh(x=3) as mesh:
        compared = compare(write, mesh)
    check_same(compared, bitwise=write not in OTHER_ROUNDING)
    (op,) = communications(compared.fused.module)
    assert op.target is torch.ops.fxpar.matmul_all_reduce.default
