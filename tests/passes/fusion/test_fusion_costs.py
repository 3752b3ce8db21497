"""What is fused goes by estimates: of what is waited for beside other computation, and of all ranks together."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import fx

from fxpar.costs.graph_time import GraphModel
from fxpar.costs.prices import prices_of
from fxpar.hardware.cluster import cluster_named
from fxpar.ir.overlap_options import NO_OVERLAP, Overlap
from fxpar.passes.fuse_collectives import fuse_collectives
from fxpar.passes.fusion.fusion_costs import FusionCost, estimate_fusions, max_over_ranks
from fxpar.passes.fusion.verdicts import Verdict, VerdictTable
from fxpar.world.mesh import Mesh
from tests.passes.fusing import modules_of
from tests.passes.gathers_to_fuse import gathered_without_a_matmul, rows
from tests.passes.overlapping import Chain, Parts, parts_of, sharded_batch
from tests.support.fake_mesh import fake_mesh

SLOW_LINK = replace(
    cluster_named("laptop"),
    matmul_flops_per_us={"float32": 1.0},
    memory_bytes_per_us=1e6,
    intra_bytes_per_us=1.0,
    intra_latency_us=1.0,
    reduce_scatter_factor=1.0,
)


def model_of(**changes: float) -> GraphModel:
    mesh = Mesh(x=2, cluster=replace(SLOW_LINK, **changes))
    return GraphModel(mesh, prices_of(mesh))


def one_gather() -> fx.GraphModule:
    with fake_mesh(x=2) as mesh:
        return modules_of(rows, mesh)[0]


def verdict_under(model: GraphModel, fuse: bool = True) -> Verdict:
    module = one_gather()
    (verdict,) = fuse_collectives(module, estimate_fusions(module, model, Overlap()), fuse).verdicts
    return verdict


def test_a_fused_op_takes_the_longer_of_both_and_a_latency() -> None:
    """Pieces of 3 x 4 doubles are gathered and multiplied with 4 x 5."""
    sent, flops = 3 * 4 * 8, 2 * 6 * 4 * 5
    (cost,) = estimate_fusions(one_gather(), model_of(), Overlap())
    assert cost.collective_us == pytest.approx(1 + sent)
    assert cost.apart_us == pytest.approx(1 + sent + flops)
    assert cost.fused_us == pytest.approx(1 + max(1 + sent, flops))


def test_what_is_waited_for_is_fused_and_what_is_cheaper_apart_is_left() -> None:
    assert verdict_under(model_of()).fused == "all_gather_matmul"
    left = verdict_under(model_of(matmul_flops_per_us={"float32": 1e9}))
    assert left.fused is None and left.reason == "beside other computation it is cheaper than with mm"
    assert verdict_under(model_of(), fuse=False).reason == "could be fused with mm"


@pytest.fixture(scope="module")
def gathering() -> Parts:
    return parts_of(Chain(4), sharded_batch, torch.randn(6, 8, requires_grad=True))


def test_gathers_that_run_beside_the_layer_before_are_left_where_links_keep_up(gathering: Parts) -> None:
    forward, _ = gathering
    quick = model_of(intra_bytes_per_us=10.0)
    beside = fuse_collectives(forward, estimate_fusions(forward, quick, Overlap()), True).verdicts
    assert [verdict.fused is not None for verdict in beside] == [True, False, False, False]
    alone = fuse_collectives(forward, estimate_fusions(forward, quick, NO_OVERLAP), True).verdicts
    assert all(verdict.fused is not None for verdict in alone)


def test_all_ranks_go_by_the_slowest_of_those_that_run_a_graph() -> None:
    one, other = FusionCost(3.0, 5.0, 4.0, "rows"), FusionCost(2.0, 9.0, 3.0, "rows")
    costs = max_over_ranks([{"forward": [one]}, {"forward": [other], "backward": [one]}])
    assert costs == {"forward": [FusionCost(3.0, 9.0, 4.0, "rows")], "backward": [one]}


def test_what_ranks_would_fuse_in_other_ways_is_not_fused() -> None:
    module = one_gather()
    (own,) = estimate_fusions(module, model_of(), Overlap())
    for other in (replace(own, fusion_key="another"), FusionCost(1.0, 1.0)):
        costs = max_over_ranks([{"forward": [own]}, {"forward": [other]}])["forward"]
        assert math.isinf(costs[0].fused_us)
        (verdict,) = fuse_collectives(module, costs, "always").verdicts
        assert verdict.reason == "the graphs of other ranks differ here"


def test_the_table_has_a_line_for_every_collective_of_every_graph() -> None:
    with fake_mesh(x=2) as mesh:
        modules = {"forward": modules_of(rows, mesh)[0], "backward": modules_of(gathered_without_a_matmul, mesh)[0]}
    verdicts = {
        name: fuse_collectives(module, estimate_fusions(module, model_of(), Overlap()), "always").verdicts
        for name, module in modules.items()
    }
    assert (
        str(VerdictTable(verdicts))
        == """\
graph     collective              kind        axis  bytes  us alone  us apart  us fused  module  verdict
forward   all_gather_into_tensor  all_gather  x       192      97.0     337.0     241.0          fused into \
all_gather_matmul with mm: wherever it can be
backward  all_gather_into_tensor  all_gather  x       192      97.0      97.0         -          left: no matmul takes \
it, but relu

1 of 2 collectives are fused with matmuls."""
    )
