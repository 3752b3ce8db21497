"""Fused collectives of whole models: all beside a matmul in a block that splits its sequence, and any at random."""

from __future__ import annotations

import pytest
import torch

from fxpar.ir.node_meta import is_backward
from fxpar.ir.stage import JointGraph
from fxpar.passes.fusion.verdicts import Verdict
from fxpar.passes.insert_collectives import insert_collectives
from fxpar.passes.partition import partition
from tests.passes.fusing import check_same, compare_modules, fuse_always
from tests.passes.overlapping import Mixed
from tests.passes.test_sequence_parallel import SUBJECTS, laid_out
from tests.support.fake_mesh import as_rank, fake_mesh
from tests.support.joint_graphs import joint_graph
from tests.support.local_graphs import inputs_of, pieces_of
from tests.support.placements import at_random, lay_out


def verdicts_of(name: str, *, backward: bool) -> list[Verdict]:
    """Those of the forward or the backward of a model that splits its sequence over two ranks."""
    stage, _ = laid_out(name)
    with fake_mesh(x=2) as mesh:
        parts = partition(insert_collectives(stage.joint, mesh))
        module = parts.backward if backward else parts.forward
        assert module is not None
        (fused,) = fuse_always([module], mesh)
    return list(fused.verdicts)


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("name", SUBJECTS)
def test_every_collective_of_a_block_that_splits_its_sequence_is_fused(name: str, backward: bool) -> None:
    blocks = SUBJECTS[name].blocks
    verdicts = verdicts_of(name, backward=backward)
    beside_matmuls = [each for each in verdicts if each.module.startswith(blocks) and each.fused is not None]
    assert len(beside_matmuls) >= 8, "two blocks gather and scatter twice each"
    left = [each for each in verdicts if each.fused is None]
    beside_none = ("it reduces by max", "no matmul produces it", "no matmul takes it")
    assert all(each.reason.startswith(beside_none) for each in left), left
    assert not any(each.done.kind == "all_gather" and each.module.startswith(blocks) for each in left)


@pytest.fixture(scope="module")
def mixed() -> JointGraph:
    return joint_graph(Mixed().double(), torch.randn(4, 6, 10, dtype=torch.double, requires_grad=True))


@pytest.mark.parametrize("sizes", [{"x": 2}, {"x": 3}, {"y": 2, "x": 2}], ids=str)
@pytest.mark.parametrize("seed", [0, 1])
def test_however_a_graph_is_laid_out_all_ranks_fuse_alike_and_give_the_same(
    mixed: JointGraph, seed: int, sizes: dict[str, int]
) -> None:
    inputs = inputs_of(mixed, seed)
    with fake_mesh(**sizes) as mesh:
        lay_out(mixed, mesh, at_random(seed))
        local = [insert_collectives(mixed, as_rank(mesh, rank)).module for rank in range(mesh.num_ranks)]
        compared = compare_modules(local, pieces_of(mixed, mesh, inputs), mesh)
    check_same(compared, bitwise=False)
    assert any(verdict.fused is not None for verdict in compared.fused.verdicts)
    assert len({is_backward(node) for node in compared.fused.module.graph.nodes}) == 2, "nodes keep their tags"
