"""The collectives of CPU tensors return what the functional ones do: in shared memory, and between hosts."""

from __future__ import annotations

import pytest
import torch
from torch import fx

from fxpar._torch.distributed import c10d_functional
from fxpar.ir.node_meta import set_value
from fxpar.lowering.cpu_collectives import replace_cpu_collectives
from fxpar.world.launch import run_ranks
from tests.lowering.graphs import traced
from tests.lowering.run_collectives import (
    expected,
    lose_a_rank,
    rounded_sums,
    rounding_value,
    scatter_in_two_graphs,
    sums_in_groups,
    wrong_results,
)

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.int64]


@pytest.mark.parametrize("hosts", ["aa", "aaa", "aaaa", "abc", "aab"])
def test_every_kind_returns_what_one_process_works_out(hosts: str) -> None:
    ranks = len(hosts)
    shapes = [(ranks, 1), (5 * ranks, 7), (300 * ranks, 11), (ranks, 0), (ranks,)]
    for wrong in run_ranks(ranks, wrong_results, hosts, shapes, DTYPES, timeout_s=60):
        assert wrong == []


def test_all_ranks_have_the_bits_of_a_sum_in_the_order_of_ranks() -> None:
    in_order = rounding_value(0) + rounding_value(1) + rounding_value(2)
    backwards = rounding_value(2) + rounding_value(1) + rounding_value(0)
    assert not torch.equal(in_order, backwards), "the order matters"
    for rank, (total, piece) in enumerate(run_ranks(3, rounded_sums, timeout_s=60)):
        assert torch.equal(total, in_order)
        assert torch.equal(piece, in_order.chunk(3)[rank])


def test_groups_that_share_ranks_do_not_mix_whatever_the_order_of_waiting() -> None:
    members = [([0, 1], [0, 2]), ([0, 1], [1, 3]), ([2, 3], [0, 2]), ([2, 3], [1, 3])]
    for own, found in zip(members, run_ranks(4, sums_in_groups, timeout_s=60), strict=True):
        groups = [range(4), own[1], own[0]]
        assert found == [sum(number + rank for rank in group) for number in range(100) for group in groups]


def test_one_graph_may_start_what_another_waits_for() -> None:
    for rank, found in enumerate(run_ranks(3, scatter_in_two_graphs, timeout_s=60)):
        assert torch.equal(found, expected("scattered sum", rank, 3, [6, 5], torch.float32))


def test_who_waits_for_a_dead_rank_learns_its_number_in_the_world_and_others_go_on() -> None:
    # In its group the dead rank is number 1.
    first, second, partner = run_ranks(4, lose_a_rank, 3, doomed=[3], timeout_s=60)
    assert (first, second) == ("", "")
    assert partner.startswith("lost rank 3 while moving a value in a collective: its process has ended"), partner


def test_graphs_without_collectives_of_cpu_tensors_stay_as_they_are() -> None:
    graph = traced(lambda x: (x + 1,), torch.ones(2))
    assert replace_cpu_collectives(graph) is graph
    graph = fx.Graph()
    reduced = graph.call_function(c10d_functional.all_reduce.default, (graph.placeholder("x"), "sum", "a group"))
    set_value(reduced, torch.empty(2, device="meta"))
    graph.output((reduced,))
    of_gpu = fx.GraphModule({}, graph)
    assert replace_cpu_collectives(of_gpu) is of_gpu
