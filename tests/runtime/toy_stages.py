"""The stages of the toy pipeline as if compiled: they take pieces, in memory order as agreed, and differentiate."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, fx, nn

from fxpar.ir.layout import Layout
from fxpar.ir.node_meta import set_value
from fxpar.ir.stage import CompiledSplit, CompiledStage, JointGraph, PlannedStage, Port, PortKind, StageBorder
from fxpar.ir.tiles import shard_of
from fxpar.schedule import Schedule
from fxpar.world.mesh import Mesh
from tests.runtime.toy_pipeline import MASK, Toy, X


def planned_stages(toy: Toy, *, with_backward: bool) -> list[PlannedStage]:
    """What every rank knows of every stage."""
    stages = []
    for index in range(len(toy.layouts)):
        inputs, outputs = toy.inputs(index), toy.outputs(index)
        tangents = toy.tangents(index) if with_backward else []
        gradients = toy.gradients(index) if with_backward else []
        border = StageBorder(
            {port: toy.layout(port, index) for port in inputs},
            {port: toy.layout(port, index) for port in outputs},
            {port: toy.layout(port, index) for port in tangents},
            {port: toy.gradient_layout(port, index) for port in gradients},
        )
        joint = _joint_graph(index, inputs, outputs, tangents, gradients, toy)
        stages.append(PlannedStage(joint, border))
    return stages


def _joint_graph(
    index: int, inputs: list[Port], outputs: list[Port], tangents: list[Port], gradients: list[Port], toy: Toy
) -> JointGraph:
    """One that has the right borders, and computes nothing."""
    graph = fx.Graph()

    def noted(node: fx.Node, port: Port) -> fx.Node:
        set_value(node, torch.empty(toy.layout(port, index).shape, dtype=dtype(port), device="meta"))
        return node

    for number, port in enumerate([*inputs, *tangents]):
        noted(graph.placeholder(f"value_{number}"), port)
    graph.output(tuple(noted(graph.call_function(torch.empty, ((),)), port) for port in [*outputs, *gradients]))
    module = fx.GraphModule(nn.Module(), graph)
    return JointGraph(index, module, tuple(inputs), tuple(outputs), tuple(tangents), tuple(gradients))


def compile_stage(toy: Toy, planned: PlannedStage, mesh: Mesh) -> CompiledStage:
    """A stage that runs its function on pieces, and differentiates by autograd."""
    joint, border = planned.joint, planned.border
    index, coordinate = joint.index, mesh.coordinate
    arrange = as_columns if index % 2 == 0 else Tensor.contiguous  # edges lead between different orders in memory
    input_pieces = [_piece(port, border.inputs[port], coordinate) for port in joint.inputs]
    tangent_pieces = [_piece(port, border.tangents[port], coordinate) for port in joint.tangents]

    def forward(*inputs: Tensor) -> list[Tensor]:
        _check_strides(joint.inputs, input_pieces, inputs)
        leaves = {port: value.detach() for port, value in zip(joint.inputs, inputs, strict=True)}
        for port in joint.gradients:
            leaves[port].requires_grad_()
        with torch.enable_grad():
            pieces = {X: shard_of(leaves[X], toy.layouts[index], coordinate)} if X in leaves else {}
            made = toy.run(index, {**leaves, **pieces})
        returned = [arrange(made[port].detach()) for port in joint.outputs]
        return [*returned, *(leaves[port] for port in joint.gradients), *(made[port] for port in joint.tangents)]

    num_leaves, num_made = len(joint.gradients), len(joint.tangents)
    from_edges = [position for position, port in enumerate(joint.gradients) if port.kind is PortKind.EDGE]
    from_weights = [position for position in range(num_leaves) if position not in from_edges]

    def gradients(values: Sequence[Tensor], wanted: Sequence[int]) -> list[Tensor]:
        leaves, made = values[:num_leaves], values[num_leaves : num_leaves + num_made]
        chosen, tangents = [leaves[position] for position in wanted], values[num_leaves + num_made :]
        _check_strides(joint.tangents, tangent_pieces, tangents)
        return list(torch.autograd.grad(made, chosen, tangents, retain_graph=True)) if chosen else []

    def backward(*values: Tensor) -> list[Tensor]:
        return gradients(values, range(num_leaves))

    def input_gradients(*values: Tensor) -> list[Tensor]:
        return [*gradients(values, from_edges), *values[num_leaves + num_made :]]  # carrying the tangents

    def weight_gradients(*values: Tensor) -> list[Tensor]:
        return gradients(values, from_weights)

    everything = tuple(range(num_leaves + num_made))
    return CompiledStage(
        index,
        forward,
        backward if joint.gradients else None,
        joint.inputs,
        joint.outputs,
        joint.tangents,
        joint.gradients,
        border,
        tuple(input_pieces),
        tuple(tangent_pieces),
        tuple(map(dtype, joint.gradients)),
        CompiledSplit(input_gradients, weight_gradients, everything, everything) if joint.gradients else None,
    )


def _check_strides(ports: Sequence[Port], pieces: Sequence[Tensor], given: Sequence[Tensor]) -> None:
    """Check that values from edges have the strides that the stage was compiled for, as Inductor's code demands."""
    for port, piece, value in zip(ports, pieces, given, strict=True):
        if port.kind is PortKind.EDGE:
            assert value.stride() == piece.stride(), f"{port}: {value.stride()}, compiled for {piece.stride()}"


def dtype(port: Port) -> torch.dtype:
    return torch.long if port == MASK else torch.double


def _piece(port: Port, layout: Layout, coordinate: Mapping[str, int]) -> Tensor:
    """What all stages of a rank expect: rank by rank, and port by port, in another order in memory."""
    piece = torch.empty(layout.local_shape(coordinate), dtype=dtype(port))
    return as_columns(piece) if (ord(port.name[-1]) + coordinate["pipe"]) % 2 == 0 else piece


def as_columns(value: Tensor) -> Tensor:
    """The same numbers, column by column in memory."""
    return value.t().contiguous().t() if value.dim() == 2 else value


def compiled_stages(toy: Toy, mesh: Mesh, schedule: Schedule) -> list[CompiledStage]:
    """This rank's stages."""
    stages = planned_stages(toy, with_backward=schedule.has_backward)
    return [compile_stage(toy, stages[index], mesh) for index in schedule.stages_of(mesh.coordinate["pipe"])]
