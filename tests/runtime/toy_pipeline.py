"""A small pipeline whose stages are plain functions: it has all that can cross a stage's border.

Every stage multiplies the activation by a weight, and adds a bias. The first one's activation also goes to every later
stage (a skip connection with several readers); the last one takes it twice, the second time through an edge of its own
that it has no gradient for. A mask of integers, an edge without any gradient, goes from the first to the last, as does
a parameter on loan. The last stage counts in a buffer, and returns predictions besides the loss.

All operations but the loss are elementwise, so that the same functions run on whole tensors and on pieces.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import TypeAlias

import torch
from torch import Tensor, fx, nn

from fxpar.ir.layout import Layout, Partial, Shard
from fxpar.ir.node_meta import set_value
from fxpar.ir.plan import PlannedParameter
from fxpar.ir.stage import CompiledSplit, CompiledStage, JointGraph, PlannedStage, Port, PortKind, StageBorder
from fxpar.ir.tiles import shard_of
from fxpar.passes.insert_reshards import insert_reshards
from fxpar.resharding.pipeline import Pipeline
from fxpar.runtime.executor import Executor, StepResult
from fxpar.runtime.loss import Loss
from fxpar.runtime.wiring import Connections, connect
from fxpar.schedule import Schedule, check_programs, lower
from fxpar.world.mesh import Mesh

ROWS, WIDTH = 3, 6
"""Shape of one microbatch's activation; two ranks share the rows unevenly."""

Values: TypeAlias = dict[Port, Tensor]

X = Port(PortKind.INPUT, "0")
SCALE = Port(PortKind.INPUT, "1")
LOSS = Port(PortKind.RESULT, "0")
PREDICTION = Port(PortKind.RESULT, "1")
COUNT = Port(PortKind.BUFFER, "count")
TIED = Port(PortKind.PARAMETER, "tied")
MASK = Port(PortKind.EDGE, "mask")
CUT = Port(PortKind.EDGE, "cut")


def weight(stage: int) -> Port:
    return Port(PortKind.PARAMETER, f"{stage}.weight")


def bias(stage: int) -> Port:
    return Port(PortKind.PARAMETER, f"{stage}.bias")


def activation(stage: int) -> Port:
    return Port(PortKind.EDGE, f"activation{stage}")


@dataclass(frozen=True, slots=True)
class Toy:
    """A pipeline of as many stages as `layouts`; each computes in its layout. The last one's must be replicated."""

    layouts: Sequence[Layout]

    @property
    def last(self) -> int:
        return len(self.layouts) - 1

    def inputs(self, stage: int) -> list[Port]:
        ports = [weight(stage), bias(stage)]
        if stage in (0, self.last):
            ports.append(TIED)
        if stage == 0:
            ports.append(X)
        else:
            ports += sorted({activation(0), activation(stage - 1)}, key=str)
        if stage == self.last:
            ports += [SCALE, COUNT] if stage == 0 else [SCALE, COUNT, MASK, CUT]
        elif stage == 1:
            ports.append(CUT)  # so that somebody has a gradient for it
        return ports

    def outputs(self, stage: int) -> list[Port]:
        if stage == self.last:
            return [LOSS, PREDICTION, COUNT]
        return [activation(0), MASK, CUT] if stage == 0 else [activation(stage)]

    def tangents(self, stage: int) -> list[Port]:
        if stage == self.last:
            return [LOSS]
        return [port for port in self.outputs(stage) if port != MASK and (port != CUT or self.last > 1)]

    def gradients(self, stage: int) -> list[Port]:
        leaves = [port for port in self.inputs(stage) if port.kind in (PortKind.PARAMETER, PortKind.EDGE)]
        return [port for port in leaves if port != MASK and (port != CUT or stage < self.last)]

    def run(self, stage: int, values: Values) -> Values:
        """The stage's function, on whole tensors or pieces."""
        previous = values[X] if stage == 0 else values[activation(stage - 1)]
        out = torch.tanh(previous * values[weight(stage)]) + values[bias(stage)]
        if stage >= 1:
            out = out + 0.5 * values[activation(0)]
        if stage == 0:
            out = out + values[TIED]
        if stage == 1 and stage < self.last:
            out = out + values[CUT].sin()
        if stage == self.last:
            return self._end(stage, out, values)
        made = {activation(stage): out}
        return made | {MASK: (values[X] > 0).long(), CUT: out * 2} if stage == 0 else made

    def _end(self, stage: int, out: Tensor, values: Values) -> Values:
        mask = values[MASK] + values[CUT].detach().sign() if stage > 0 else 1.0
        out = out * mask * values[TIED]
        count = 0.5 * values[COUNT] + out.detach().mean()
        return {LOSS: (out * values[SCALE]).square().mean(), PREDICTION: out, COUNT: count}

    def layout(self, port: Port, stage: int) -> Layout:
        """How a port lies on the stage's ranks; inputs come whole."""
        if port.kind is PortKind.INPUT:
            return Layout((ROWS, WIDTH))
        if port in (LOSS, COUNT) or port.name.endswith("bias"):
            return Layout(())
        return self.layouts[stage]

    def gradient_layout(self, port: Port, stage: int) -> Layout:
        """As the value; but a rank's piece of an activation returns only a part of the bias's gradient."""
        if not port.name.endswith("bias"):
            return self.layout(port, stage)
        sharded = [axis for axis, placement in self.layouts[stage].axes if isinstance(placement, Shard)]
        return Layout((), tuple((axis, Partial()) for axis in sharded))


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


def pipeline(toy: Toy, mesh: Mesh, schedule: Schedule) -> Pipeline:
    """The stages and what moves between them."""
    stages = planned_stages(toy, with_backward=schedule.has_backward)
    return insert_reshards(stages, mesh, owners(toy), schedule.placement)


def make_connections(
    toy: Toy, mesh: Mesh, schedule: Schedule, own: Sequence[CompiledStage], timeout_s: float = 60
) -> Connections:
    """This rank's connections, wired as a compiled model's are."""
    timeout = timedelta(seconds=timeout_s)
    reshards = pipeline(toy, mesh, schedule).reshards
    return connect(reshards, own, mesh, schedule.num_microbatches, timeout, answered=False)


def make_executor(
    toy: Toy, mesh: Mesh, schedule: Schedule, own: Sequence[CompiledStage], connections: Connections
) -> Executor:
    """This rank's executor of its stages."""
    edges = pipeline(toy, mesh, schedule).edges
    programs = lower(schedule, edges)
    check_programs(programs, schedule, edges)
    loss = Loss(0, torch.double)
    program = programs[mesh.coordinate["pipe"]]
    return Executor(mesh, program, own, connections, schedule.num_microbatches, {"0": 0}, loss)


def owners(toy: Toy) -> dict[str, PlannedParameter]:
    """The first stage that uses each parameter, and how it lies there."""
    planned: dict[str, PlannedParameter] = {}
    for stage in range(len(toy.layouts)):
        for port in toy.inputs(stage):
            if port.kind is PortKind.PARAMETER:
                planned.setdefault(port.name, PlannedParameter(stage, toy.layout(port, stage)))
    return planned


def whole_values(toy: Toy, batch: int) -> dict[str, Tensor]:
    """Random logical parameters, the buffer, and the two inputs of a global batch, by name."""
    generator = torch.Generator().manual_seed(7)
    random = partial(torch.randn, generator=generator, dtype=torch.double)
    values = {name: random(planned.layout.shape) for name, planned in owners(toy).items()}
    return values | {"count": random(()), "0": random(batch, WIDTH), "1": random(ROWS, WIDTH)}


def run_step(
    toy: Toy, executor: Executor, mesh: Mesh, own: Sequence[CompiledStage], values: Mapping[str, Tensor], count: Tensor
) -> StepResult:
    """One step of this rank's `own` stages on its pieces of `values`; `count` is its buffer."""
    stages, coordinate = {stage.index for stage in own}, mesh.coordinate
    parameters = {
        name: as_columns(shard_of(values[name], planned.layout, coordinate).clone())
        for name, planned in owners(toy).items()
        if planned.stage in stages
    }
    shard = values["0"].chunk(mesh.data)[coordinate["data"]]
    with torch.no_grad():
        return executor.run(parameters, {"count": count}, {"0": shard, "1": values["1"]})


@dataclass(frozen=True, slots=True)
class Expected:
    """What one process computes: predictions and buffers by batch shard."""

    loss: Tensor
    gradients: dict[str, Tensor]
    predictions: list[list[Tensor]]
    counts: list[Tensor]


def run_alone(toy: Toy, values: Mapping[str, Tensor], data: int, microbatches: int) -> Expected:
    """The same step on whole tensors, microbatch after microbatch."""
    parameters = {name: values[name].clone().requires_grad_() for name in owners(toy)}
    losses, predictions, counts = [], [], []
    for shard in values["0"].chunk(data):
        count, found = values["count"], []
        for microbatch in shard.chunk(microbatches):
            known = {Port(PortKind.PARAMETER, name): p for name, p in parameters.items()}
            known |= {X: microbatch, SCALE: values["1"], COUNT: count}
            for stage in range(len(toy.layouts)):
                known |= toy.run(stage, known)
            losses.append(known[LOSS])
            found.append(known[PREDICTION].detach())
            count = known[COUNT].detach()
        predictions.append(found)
        counts.append(count)
    loss = torch.stack(losses).mean()
    gradients = torch.autograd.grad(loss, list(parameters.values()))
    return Expected(loss.detach(), dict(zip(parameters, gradients, strict=True)), predictions, counts)
