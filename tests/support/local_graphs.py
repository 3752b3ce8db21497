"""Run the local graphs of all ranks on pieces of random inputs, and compare with the whole."""

from __future__ import annotations

import torch
from torch import Tensor

from fxpar.ir.node_meta import placed, value
from fxpar.ir.stage import JointGraph
from fxpar.ir.tiles import assemble, shard_of
from fxpar.passes.insert_collectives import insert_collectives
from fxpar.world.mesh import Mesh
from tests.support.fake_mesh import as_rank
from tests.support.lockstep import run_ranks_in_lockstep


def inputs_of(joint: JointGraph, seed: int) -> list[Tensor]:
    """Random inputs and tangents of a joint graph; numbers of classes where they are whole."""
    generator = torch.Generator().manual_seed(seed)
    values = [value(node) for node in joint.module.graph.find_nodes(op="placeholder")]
    return [
        torch.randn(fake.shape, generator=generator, dtype=fake.dtype)
        if fake.dtype.is_floating_point
        else torch.randint(0, 10, fake.shape, generator=generator)
        for fake in values
    ]


def run_local_graphs(joint: JointGraph, mesh: Mesh, inputs: list[Tensor]) -> list[list[Tensor]]:
    """The outputs of every rank's local graph."""
    graphs = [insert_collectives(joint, as_rank(mesh, rank)).module.graph for rank in range(mesh.num_ranks)]
    return run_ranks_in_lockstep(graphs, pieces_of(joint, mesh, inputs), mesh)


def pieces_of(joint: JointGraph, mesh: Mesh, inputs: list[Tensor]) -> list[list[Tensor]]:
    """For every rank, its pieces of the inputs and tangents of a laid-out joint graph."""
    layouts = [placed(node).outputs[0] for node in joint.module.graph.find_nodes(op="placeholder")]

    def pieces_at(place: dict[str, int]) -> list[Tensor]:
        return [shard_of(whole, layout, place).contiguous() for whole, layout in zip(inputs, layouts, strict=True)]

    return [pieces_at(mesh.coordinate_of(rank)) for rank in range(mesh.num_ranks)]


def check_pieces(joint: JointGraph, mesh: Mesh, found: list[list[Tensor]], expected: list[Tensor]) -> None:
    """Every rank's outputs are its pieces of the expected ones; partial ones add up to them."""
    (output,) = joint.module.graph.find_nodes(op="output")
    for position, (whole, layout) in enumerate(zip(expected, placed(output).inputs, strict=True)):
        pieces = [(mesh.coordinate_of(rank), outputs[position]) for rank, outputs in enumerate(found)]
        if layout.is_partial:
            axes = [axis for axis, _ in layout.axes]
            once = {tuple(place[axis] for axis in axes): (place, piece) for place, piece in pieces}
            torch.testing.assert_close(assemble(once.values(), layout), whole, rtol=1e-9, atol=1e-9)
        else:
            for place, piece in pieces:
                torch.testing.assert_close(piece, shard_of(whole, layout, place), rtol=1e-9, atol=1e-9)
