"""Collectives that cannot become one op with a matmul are left as they are, each with its reason."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import fx

from fxpar.graph.graph_writer import aten
from tests.passes.fusing import Local, Write, check_same, compare
from tests.passes.gathers_to_fuse import gathered_without_a_matmul
from tests.support.fake_mesh import fake_mesh


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
