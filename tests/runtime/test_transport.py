"""Values arrive whole, each its own, whatever the layouts, dtypes, orders in memory and orders of sending."""

from __future__ import annotations

import random
import re

import torch

from fxpar.launch import run_ranks
from fxpar.layout import Layout, Shard
from fxpar.mesh import Mesh
from fxpar.tiles import shard_of
from tests.runtime.move_values import Move, carry_out, lose_the_sender, send_another_shape, whole_value


def moves_at_random(count: int) -> list[Move]:
    """Between replicas, even and ragged shards, and shards inside dims; of many dtypes."""
    generator = random.Random(0)
    dtypes = [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.bool]
    moves = []
    for _ in range(count):
        shape = (generator.randint(1, 8), generator.randint(1, 8))
        shards = [Shard(dim, 2, outer) for dim in (0, 1) for outer in range(1, shape[dim] + 1)]
        shards = [shard for shard in shards if Layout(shape).accepts(shard)]
        ends = [Layout(shape) for _ in range(2)]
        ends = [e.with_placement("x", generator.choice(shards)) if generator.random() < 0.7 else e for e in ends]
        columns = generator.random() < 0.5, generator.random() < 0.5
        moves.append(Move(ends[0], ends[1], generator.choice(dtypes), columns))
    return moves


def check(moves: list[Move], sizes: dict[str, int], microbatches: int) -> None:
    mesh = Mesh(**sizes)
    received = run_ranks(mesh.num_ranks, carry_out, moves, sizes, microbatches, timeout_s=100)
    for at in mesh.stage_coordinates(1):
        for move, values in zip(moves, received[mesh.rank_at(at)], strict=True):
            for microbatch, found in enumerate(values):
                whole = whole_value(move, microbatch, at["data"])
                assert torch.equal(found, shard_of(whole, move.target, at)), f"{move}, microbatch {microbatch}, {at}"
                is_column_order = move.columns[1] and found.dim() == 2
                assert (found.t() if is_column_order else found).is_contiguous(), f"{move}: order in memory"


def test_any_layout_to_any_other() -> None:
    check(moves_at_random(40), {"pipe": 2, "x": 2}, microbatches=2)


def test_batch_shards_are_moved_apart() -> None:
    check([Move(Layout((3, 2)), Layout((3, 2)))], {"pipe": 2, "data": 2}, microbatches=4)


def test_scalars_and_empty_pieces() -> None:
    one_row = Layout((1, 3))
    moves = [Move(Layout(()), Layout(())), Move(one_row.with_placement("x", Shard(0, 2)), one_row)]
    check([*moves, Move(moves[1].target, moves[1].source)], {"pipe": 2, "x": 2}, microbatches=1)


def test_a_piece_of_another_shape_is_not_sent() -> None:
    complaint, _ = run_ranks(2, send_another_shape)
    assert complaint == "the toy: a piece of (2, 4), planned (4, 2)"


def test_a_lost_peer_is_named_with_what_it_should_have_sent() -> None:
    _, error = run_ranks(2, lose_the_sender, timeout_s=100)
    assert re.match(r"lost rank 0 while moving the value of edge toy: .*; look at that rank's own output", error, re.S)
