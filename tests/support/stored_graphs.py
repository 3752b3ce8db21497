"""Joint graphs whose parameters are stored in shards over z, run on all ranks of a mesh in one process."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fxpar.ir.layout import REPLICATE, Layout
from fxpar.ir.node_meta import Placed, placed, set_placed
from fxpar.ir.stage import JointGraph, Port, PortKind, StageBorder
from fxpar.ir.tiles import shard_of
from fxpar.passes.hoist_storage import Hoisted
from fxpar.passes.shard_storage import shard_storage
from fxpar.world.mesh import Mesh
from tests.support.local_graphs import inputs_of
from tests.support.lockstep import run_ranks_in_lockstep
from tests.support.placements import Choose, lay_out


def lay_out_stored(joint: JointGraph, mesh: Mesh, choose: Choose) -> StageBorder:
    """Place every node over y and x as `choose` says, gradients as their parameters, and store these over z."""
    lay_out(joint, mesh, choose)
    placeholders = joint.module.graph.find_nodes(op="placeholder")
    inputs = {port: _given(placed(node)) for port, node in zip(joint.inputs, placeholders, strict=False)}
    output = joint.module.graph.output_node()
    needs = placed(output).inputs
    gradients = {port: inputs[port] for port in joint.gradients}
    set_placed(output, Placed((*needs[: len(joint.outputs)], *gradients.values()), ()))
    outputs = dict(zip(joint.outputs, needs, strict=False))
    tangents = {
        port: _given(placed(node)) for port, node in zip(joint.tangents, placeholders[len(inputs) :], strict=True)
    }
    return shard_storage(joint, StageBorder(inputs, outputs, tangents, gradients), mesh)


def _given(layouts: Placed) -> Layout:
    (layout,) = layouts.outputs
    assert layout is not None, "only tensors enter"
    return layout


class Batches:
    """Random inputs of a joint graph for a number of microbatches: parameters are the same for all and along z."""

    def __init__(self, joint: JointGraph, mesh: Mesh, border: StageBorder, microbatches: int) -> None:
        self._joint, self._mesh, self._border = joint, mesh, border
        draws = [[inputs_of(joint, 100 * z + number) for number in range(microbatches)] for z in range(mesh.z)]
        self._inputs = [[self._with_parameters_of(draws[0][0], draw) for draw in of_z] for of_z in draws]

    def _with_parameters_of(self, first: list[Tensor], draw: list[Tensor]) -> list[Tensor]:
        same = [port.kind is PortKind.PARAMETER for port in self._joint.inputs]
        same += [False] * (len(draw) - len(same))
        return [one if keep else other for keep, one, other in zip(same, first, draw, strict=True)]

    def pieces(self, number: int) -> list[list[Tensor]]:
        """For every rank, its pieces of the inputs and tangents of microbatch `number`."""
        layouts = [
            *(self._border.inputs[port] for port in self._joint.inputs),
            *(self._border.tangents[port] for port in self._joint.tangents),
        ]
        found = []
        for rank in range(self._mesh.num_ranks):
            place = self._mesh.coordinate_of(rank)
            wholes = self._inputs[place["z"]][number]
            found.append([shard_of(t, lay, place).contiguous() for t, lay in zip(wholes, layouts, strict=True)])
        return found

    def check(self, gradients: Sequence[dict[Port, Tensor]]) -> None:
        """Every rank's gradients of parameters are its pieces of the sums over microbatches and, if in shards, over z.

        One that z does not shard is this rank's term.
        """
        for port in self._joint.gradients:
            if port.kind is PortKind.PARAMETER:
                terms = [self._terms(port, z) for z in range(self._mesh.z)]
                for rank, of_rank in enumerate(gradients):
                    self._check_piece(port, terms, of_rank[port], self._mesh.coordinate_of(rank))

    def _terms(self, port: Port, z: int) -> Tensor:
        place = len(self._joint.outputs) + self._joint.gradients.index(port)
        return torch.stack([self._joint.module(*draw)[place] for draw in self._inputs[z]]).sum(0)

    def _check_piece(self, port: Port, terms: Sequence[Tensor], found: Tensor, at: dict[str, int]) -> None:
        layout = self._border.gradients[port]
        whole = terms[at["z"]] if layout.placement("z") == REPLICATE else torch.stack(list(terms)).sum(0)
        torch.testing.assert_close(
            found,
            shard_of(whole, layout, at),
            rtol=1e-9,
            atol=1e-9,
            msg=lambda text: f"{port} as {layout} at {at}: {text}",
        )


def run_stored(ranks: Sequence[Hoisted], batches: Batches, microbatches: int, mesh: Mesh) -> list[dict[Port, Tensor]]:
    """Every rank's gradients of its parameters: gathers once, a graph for each microbatch, reductions once."""
    first = ranks[0]
    gathered: list[dict[Port, Tensor]] = [{} for _ in ranks]
    sums: list[dict[Port, Tensor]] = [{} for _ in ranks]
    for number in range(microbatches):
        pieces = batches.pieces(number)
        held = [dict(zip(first.body.inputs, own, strict=False)) for own in pieces]
        if number == 0 and first.gathers is not None:
            ports = first.gathers.ports
            given = _lockstep([_gathers(each) for each in ranks], [[own[p] for p in ports] for own in held], mesh)
            gathered = [dict(zip(ports, each, strict=True)) for each in given]
        num_inputs = len(first.body.inputs)
        arguments = [
            [*(has.get(port, own[port]) for port in first.body.inputs), *all_[num_inputs:]]
            for has, own, all_ in zip(gathered, held, pieces, strict=True)
        ]
        made = _lockstep([each.body.module for each in ranks], arguments, mesh)
        for total, values in zip(sums, made, strict=True):
            for port, gradient in zip(first.body.gradients, values[len(first.body.outputs) :], strict=True):
                total[port] = total[port] + gradient if port in total else gradient
    if first.reductions is not None:
        ports = first.reductions.ports
        values: list[Sequence[Tensor]] = [[total[port] for port in ports] for total in sums]
        for part in ("start", "finish"):
            values = _lockstep([getattr(each.reductions, part) for each in ranks], values, mesh)
        for total, reduced in zip(sums, values, strict=True):
            total |= zip(ports, reduced, strict=True)
    return sums


def _gathers(hoisted: Hoisted) -> torch.fx.GraphModule:
    assert hoisted.gathers is not None, "all ranks gather, or none does"
    return hoisted.gathers.module


def _lockstep(
    modules: Sequence[torch.fx.GraphModule], inputs: Sequence[Sequence[Tensor]], mesh: Mesh
) -> list[Sequence[Tensor]]:
    return run_ranks_in_lockstep([module.graph for module in modules], inputs, mesh)
