"""Where shards go through the ops that only move values; the values themselves are proved elsewhere."""

from __future__ import annotations

import pytest
import torch
from test_einsum import call_of, extend

from fxpar.ir.layout import REPLICATE, Shard
from fxpar.rules import rule_for

aten = torch.ops.aten


def through_view(source: tuple[int, ...], result: tuple[int, ...], shard: Shard) -> object:
    """What a view makes of a shard of its operand."""
    call = call_of(aten.view.default, source, list(result), outputs=(result,))
    placements = extend(rule_for(aten.view.default), call, "input", 0, shard)
    return placements and placements[1]


def test_flattening_multiplies_the_leading_values() -> None:
    assert through_view((4, 6, 5), (24, 5), Shard(0, 2)) == Shard(0, 2)
    assert through_view((4, 6, 5), (24, 5), Shard(1, 2)) == Shard(0, 2, outer=4)
    assert through_view((4, 6, 5), (24, 5), Shard(1, 2, outer=3)) == Shard(0, 2, outer=12)
    assert through_view((5, 6, 4), (5, 24), Shard(0, 5)) == Shard(0, 5)


def test_splitting_divides_them() -> None:
    assert through_view((24, 5), (4, 6, 5), Shard(0, 2)) == Shard(0, 2)
    assert through_view((24, 5), (4, 6, 5), Shard(0, 2, outer=2)) == Shard(0, 2, outer=2)
    assert through_view((24, 5), (4, 6, 5), Shard(0, 2, outer=4)) == Shard(1, 2)
    assert through_view((24, 5), (4, 6, 5), Shard(0, 3, outer=8)) == Shard(1, 3, outer=2)


def test_a_shard_that_straddles_dims_is_refused() -> None:
    assert through_view((24,), (4, 6), Shard(0, 8)) is None
    assert through_view((24,), (4, 6), Shard(0, 3, outer=2)) is None
    assert through_view((24,), (3, 8), Shard(0, 2, outer=2)) is None


def test_dims_that_share_no_boundary_are_one_group() -> None:
    assert through_view((6, 4), (4, 6), Shard(0, 2)) == Shard(0, 2)
    assert through_view((6, 4), (4, 6), Shard(0, 3)) is None
    assert through_view((6, 4), (4, 6), Shard(1, 2)) is None
    assert through_view((6, 4), (4, 6), Shard(1, 2, outer=2)) == Shard(1, 2, outer=3)


def test_a_ragged_dim_stays_if_the_view_leaves_it() -> None:
    assert through_view((2, 3, 7), (6, 7), Shard(2, 2)) == Shard(1, 2)
    assert through_view((1, 7, 1), (7,), Shard(1, 2)) == Shard(0, 2)
    assert through_view((7, 3), (21,), Shard(0, 2)) is None


def test_a_fused_projection_splits_by_heads_into_q_k_and_v() -> None:
    pieces = ((2, 5, 8),) * 3
    call = call_of(aten.split.Tensor, (2, 5, 24), 8, 2, outputs=pieces)
    rule = rule_for(aten.split.Tensor)
    assert extend(rule, call, "input", 0, Shard(2, 2, outer=3)) == (Shard(2, 2, outer=3), *[Shard(2, 2)] * 3)
    assert extend(rule, call, "output", 1, Shard(2, 2)) == (Shard(2, 2, outer=3), *[Shard(2, 2)] * 3)
    assert extend(rule, call, "input", 0, Shard(2, 2)) is None


def test_its_gradient_is_concatenated_the_other_way() -> None:
    call = call_of(aten.cat.default, (2, 8), (2, 8), (2, 8), outputs=((2, 24),))
    call = type(call)(call.target, ([*call.args], 1), {}, call.inputs, call.outputs)
    placements = extend(rule_for(aten.cat.default), call, "output", 0, Shard(1, 2, outer=3))
    assert placements == (*[Shard(1, 2)] * 3, Shard(1, 2, outer=3))


def test_one_of_several_equal_slices_is_a_piece_of_a_split() -> None:
    call = call_of(aten.slice.Tensor, (2, 24), 1, 8, 16, outputs=((2, 8),))
    rule = rule_for(aten.slice.Tensor)
    assert extend(rule, call, "input", 0, Shard(1, 2, outer=3)) == (Shard(1, 2, outer=3), Shard(1, 2))
    other = call_of(aten.slice.Tensor, (2, 24), 1, 7, 15, outputs=((2, 8),))
    assert extend(rule, other, "input", 0, Shard(1, 2, outer=3)) is None


def test_unequal_pieces_are_sharded_within_blocks_of_their_common_length() -> None:
    call = call_of(aten.cat.default, (2, 16), (2, 8), outputs=((2, 24),))
    call = type(call)(call.target, ([*call.args], 1), {}, call.inputs, call.outputs)
    rule = rule_for(aten.cat.default)
    blocks = (Shard(1, 2, outer=2), Shard(1, 2), Shard(1, 2, outer=3))
    assert extend(rule, call, "input", 0, blocks[0]) == blocks
    assert extend(rule, call, "input", 1, blocks[1]) == blocks
    assert extend(rule, call, "output", 0, blocks[2]) == blocks
    assert extend(rule, call, "input", 0, Shard(1, 2)) is None
    assert extend(rule, call, "output", 0, Shard(1, 2)) is None


def test_what_is_concatenated_with_nothing_is_sharded_as_it_is() -> None:
    call = call_of(aten.cat.default, (0,), (2, 4, 6), outputs=((2, 4, 6),))
    call = type(call)(call.target, ([*call.args], -2), {}, call.inputs, call.outputs)
    rule = rule_for(aten.cat.default)
    for shard in (Shard(0, 2), Shard(1, 2), Shard(1, 2, outer=2), Shard(2, 3)):
        assert extend(rule, call, "input", 1, shard) == (REPLICATE, shard, shard)
        assert extend(rule, call, "output", 0, shard) == (REPLICATE, shard, shard)


def test_a_slice_is_sharded_within_blocks_of_which_it_has_all_or_nothing() -> None:
    call = call_of(aten.slice.Tensor, (2, 24), 1, 4, 20, outputs=((2, 16),))
    rule = rule_for(aten.slice.Tensor)
    assert extend(rule, call, "input", 0, Shard(1, 2, outer=6)) == (Shard(1, 2, outer=6), Shard(1, 2, outer=4))
    assert extend(rule, call, "output", 0, Shard(1, 2, outer=4)) == (Shard(1, 2, outer=6), Shard(1, 2, outer=4))
    assert extend(rule, call, "output", 0, Shard(1, 2, outer=2)) is None, "it starts inside a block"


@pytest.mark.parametrize(("shard", "expected"), [(Shard(0, 2), None), (Shard(2, 2), (Shard(2, 2), Shard(1, 2)))])
def test_a_selected_dim_is_whole(shard: Shard, expected: object) -> None:
    call = call_of(aten.select.int, (4, 5, 6), 0, 1, outputs=((5, 6),))
    assert extend(rule_for(aten.select.int), call, "input", 0, shard) == expected


def test_an_expanded_dim_may_be_sharded_in_the_result_alone() -> None:
    call = call_of(aten.expand.default, (2, 1, 4), [2, 6, 4], outputs=((2, 6, 4),))
    assert extend(rule_for(aten.expand.default), call, "output", 0, Shard(1, 2)) == (REPLICATE, Shard(1, 2))
