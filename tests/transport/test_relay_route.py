"""Values arrive whole, each its own, whatever the layouts, dtypes, orders in memory, hosts and strategies."""

from __future__ import annotations

import random
import re

import pytest
import torch
from torch import Tensor

from fxpar.ir.layout import Layout, Shard
from fxpar.ir.tiles import shard_of
from fxpar.resharding.strategies import STRATEGIES
from fxpar.world.launch import run_ranks
from fxpar.world.mesh import Mesh
from tests.runtime.move_values import Move, carry_out, lose_the_sender, send_another_piece, whole_value

HOSTS = {"one host": (0,) * 8, "two hosts": (0, 1, 0, 1, 0, 1, 0, 1), "a host each": tuple(range(8))}


def moves_at_random(count: int, num_targets: int = 1) -> list[Move]:
    """Between replicas, even and ragged shards, and shards inside dims; of many dtypes."""
    generator = random.Random(0)
    dtypes = [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.bool]
    moves = []
    for _ in range(count):
        shape = (generator.randint(1, 8), generator.randint(1, 8))
        shards = [Shard(dim, 2, outer) for dim in (0, 1) for outer in range(1, shape[dim] + 1)]
        shards = [shard for shard in shards if Layout(shape).accepts(shard)]
        ends = [Layout(shape) for _ in range(1 + num_targets)]
        ends = [e.with_placement("x", generator.choice(shards)) if generator.random() < 0.7 else e for e in ends]
        columns = generator.random() < 0.5, generator.random() < 0.5
        moves.append(Move(ends[0], tuple(ends[1:]), generator.choice(dtypes), columns))
    return moves


def check(
    moves: list[Move],
    sizes: dict[str, int],
    microbatches: int,
    hosts: str = "one host",
    strategy: str = "broadcast",
) -> None:
    mesh = Mesh(**sizes)
    arguments = moves, sizes, HOSTS[hosts], microbatches, strategy
    received = run_ranks(mesh.num_ranks, carry_out, *arguments, timeout_s=100)
    for stage in range(1, mesh.pipe):
        for at in mesh.stage_coordinates(stage):
            for move, values in zip(moves, received[mesh.rank_at(at)], strict=True):
                for microbatch, found in enumerate(values):
                    whole, target = whole_value(move, microbatch, at["data"]), move.targets[stage - 1]
                    assert torch.equal(found, shard_of(whole, target, at)), f"{move}, microbatch {microbatch}, {at}"
                    is_column_order = move.columns[1] and found.dim() == 2
                    assert (found.t() if is_column_order else found).is_contiguous(), f"{move}: order in memory"


@pytest.mark.parametrize("hosts", HOSTS)
def test_any_layout_to_any_other(hosts: str) -> None:
    check(moves_at_random(40), {"pipe": 2, "x": 2}, 2, hosts)


@pytest.mark.parametrize("hosts", HOSTS)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_one_value_for_two_stages(strategy: str, hosts: str) -> None:
    check(moves_at_random(10, num_targets=2), {"pipe": 3, "x": 2}, 2, hosts, strategy)


@pytest.mark.parametrize("hosts", HOSTS)
def test_batch_shards_are_moved_apart(hosts: str) -> None:
    check([Move(Layout((3, 2)), (Layout((3, 2)),))], {"pipe": 2, "data": 2}, 4, hosts)


@pytest.mark.parametrize("hosts", HOSTS)
def test_scalars_and_empty_pieces(hosts: str) -> None:
    one_row = Layout((1, 3))
    split = one_row.with_placement("x", Shard(0, 2))
    moves = [Move(Layout(()), (Layout(()),)), Move(split, (one_row,)), Move(one_row, (split,))]
    check(moves, {"pipe": 2, "x": 2}, 1, hosts)


@pytest.mark.parametrize("piece", [torch.zeros(2, 4), torch.zeros(4, 2, dtype=torch.float64)], ids=["shape", "dtype"])
def test_another_piece_than_planned_is_not_sent(piece: Tensor) -> None:
    complaint, _ = run_ranks(2, send_another_piece, piece)
    found, planned = f"{(1, *piece.shape)} and {piece.dtype}", "(1, 4, 2) and torch.float32"
    assert complaint == (
        "the value of edge toy 0 from stage 0 to stage 1: rank 0 would send a piece of shape "
        f"{found}, but {planned} are planned; nothing was sent"
    )


@pytest.mark.parametrize("hosts", ["one host", "a host each"])
def test_a_lost_peer_is_named_with_what_it_should_have_sent(hosts: str) -> None:
    _, error = run_ranks(2, lose_the_sender, HOSTS[hosts], timeout_s=100)
    assert re.match(r"lost rank 0 while moving .*the value of edge toy 0 from stage 0 to stage 1.*", error, re.S), error
    assert "look at that rank's own output" in error
