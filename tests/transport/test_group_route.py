"""Broadcasts in groups move what messages move; tested on gloo, whose collectives mean the same as NCCL's."""

from fxpar.world.launch import run_ranks
from tests.transport.pass_in_groups import move_there_and_back


def test_every_strategy_moves_values_both_ways_between_overlapping_meshes() -> None:
    assert run_ranks(6, move_there_and_back, timeout_s=200) == [[]] * 6
