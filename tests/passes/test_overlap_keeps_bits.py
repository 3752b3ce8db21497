"""However a graph is laid out, every rank has the same starts after overlapping, and the same bits come out."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, fx

from fxpar.graph.collective_sites import Site, find_sites
from fxpar.ir.node_meta import Communication, communication
from fxpar.ir.overlap_options import OVERLAP_RULES, Overlap
from fxpar.ir.stage import JointGraph
from fxpar.passes.bucket_collectives import bucket_collectives
from fxpar.passes.insert_collectives import collectives, insert_collectives
from fxpar.passes.overlap_collectives import overlap_collectives
from tests.passes.overlapping import Mixed
from tests.support.fake_mesh import as_rank, fake_mesh
from tests.support.joint_graphs import joint_graph
from tests.support.local_graphs import inputs_of, pieces_of
from tests.support.lockstep import run_ranks_in_lockstep
from tests.support.placements import at_random, lay_out
from tests.support.stored_graphs import lay_out_stored


@pytest.fixture(scope="module")
def mixed() -> JointGraph:
    return joint_graph(Mixed().double(), torch.randn(4, 6, 10, dtype=torch.double, requires_grad=True))


@pytest.mark.parametrize(("seed", "sizes"), [(0, {"x": 3}), (3, {"x": 3}), (2, {"y": 2, "x": 2})], ids=str)
def test_all_ranks_start_alike_and_get_the_same_bits_however_a_graph_is_laid_out(
    mixed: JointGraph, seed: int, sizes: dict[str, int]
) -> None:
    inputs = inputs_of(mixed, seed)
    with fake_mesh(**sizes) as mesh:
        lay_out(mixed, mesh, at_random(seed))
        local = [insert_collectives(mixed, as_rank(mesh, rank)).module for rank in range(mesh.num_ranks)]
        pieces = pieces_of(mixed, mesh, inputs)
        before = run_ranks_in_lockstep([module.graph for module in local], pieces, mesh)
        for overlap in (Overlap(), Overlap(gather_ahead_bytes=500)):
            after = [overlap_collectives(module, overlap) for module in local]
            assert len({starts(module) for module in after}) == 1, "ranks start different collectives"
            found = run_ranks_in_lockstep([module.graph for module in after], pieces, mesh)
            assert all(map(same_bits, found, before))


@pytest.mark.parametrize("sizes", [{"z": 3}, {"z": 2, "x": 2}], ids=str)
def test_weights_in_shards_are_gathered_ahead_one_by_one_or_together(mixed: JointGraph, sizes: dict[str, int]) -> None:
    inputs = inputs_of(mixed, 0)
    with fake_mesh(**sizes) as mesh:
        lay_out_stored(mixed, mesh, at_random(0))
        local = [insert_collectives(mixed, as_rank(mesh, rank)).module for rank in range(mesh.num_ranks)]
        for module in local:
            bucket_collectives(module, small_bytes=500)
        pieces = pieces_of(mixed, mesh, inputs)
        before = run_ranks_in_lockstep([module.graph for module in local], pieces, mesh)
        after = [overlap_collectives(module, Overlap()) for module in local]
        found = run_ranks_in_lockstep([module.graph for module in after], pieces, mesh)
        assert all(map(same_bits, found, before))
        of_weights = [site for site in find_sites(local[0].graph, set(OVERLAP_RULES)) if move_of(site).axis == "z"]
        assert {(move_of(site).kind, site.rule) for site in of_weights} == {
            ("all_gather", "all_gathers"),
            ("reduce_scatter", "reduce_scatters"),
        }
        assert len({starts(module) for module in after}) == 1, "ranks start different collectives"


def move_of(site: Site) -> Communication:
    done = communication(site.start)
    assert done is not None
    return done


def starts(module: fx.GraphModule) -> tuple[tuple[str, str], ...]:
    return tuple((found.kind, found.axis) for found in collectives(module.graph))


def same_bits(found: Sequence[Tensor], expected: Sequence[Tensor]) -> bool:
    return all(map(torch.equal, found, expected))
