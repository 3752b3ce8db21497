"""Join the stages into one graph, in which every transfer between stages is a node that has its plan."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, fx

from fxpar.costs.prices import cluster_of
from fxpar.ir.node_meta import tensor
from fxpar.ir.plan import PlannedParameter
from fxpar.ir.stage import PlannedStage, Port, PortKind
from fxpar.passes.stages.crossings import (
    StageNodes,
    TiedParameter,
    gradient_crossing,
    stage_edges,
    tied_crossing,
    tied_gradient_crossing,
    tied_parameters,
    value_crossings,
)
from fxpar.passes.stages.pipeline_graph import PipelineGraph, StageCall
from fxpar.progress.phases import as_phase
from fxpar.resharding.pipeline import Crossing, Pipeline, Reshard
from fxpar.schedule import Edge
from fxpar.world.mesh import Mesh


@torch.library.custom_op("fxpar::reshard", mutates_args=())
def reshard(x: Tensor, source: int, targets: list[int]) -> Tensor:
    """`x` of stage `source` on the ranks of all `targets`: the identity on logical values."""
    return x.clone()


@reshard.register_fake
def _reshard_fake(x: Tensor, source: int, targets: list[int]) -> Tensor:
    return torch.empty_like(x)


@as_phase
def insert_reshards(
    stages: Sequence[PlannedStage],
    mesh: Mesh,
    owners: Mapping[str, PlannedParameter],
    placement: Sequence[int] | None = None,
    *,
    strategy: str = "broadcast",
    algorithm: str = "best",
) -> Pipeline:
    """The step of one microbatch as one graph, in logical shapes: calls of the stages, and of `fxpar.reshard`.

    A value that several stages use is sent to all of them by one multicast, unless values move in process groups, in
    which a stage that needs it early would wait for one that needs it late. Each user sends its gradient back, zeros if
    it has none, and the producer adds them up. The owner of a tied parameter sends it to its other users likewise.

    The graph takes one dict per stage, of the parameters and buffers that only this stage uses, then tied parameters,
    inputs, and the gradient of the loss. It returns the results, the gradients of tied parameters and of inputs, one
    dict per stage of its other gradients, and for each stage that updates buffers a dict of their new values.

    Before: `x = stage_0(...)`, `y = stage_1(x)`, `loss = stage_2(x, y)`, each stage a graph of its own
    After:  `x_on_1_2 = fxpar.reshard(x, 0, [1, 2])`, `y = stage_1(x_on_1_2)`, ..., one graph

    Args:
        owners: by name, the stage that owns each parameter, and its layout there.
        placement: of each stage on the pipe axis; by default stage s is at s.
        strategy, algorithm: as of `make_plan`.

    Raises:
        UnknownStrategyError, UnknownAlgorithmError: no such name.
    """
    network = cluster_of(mesh).network

    def plan(crossing: Crossing) -> Reshard:
        return crossing.planned(mesh, network, strategy, algorithm)

    placement = tuple(range(len(stages))) if placement is None else tuple(placement)
    nodes = [StageNodes.of(stage) for stage in stages]
    graph = PipelineGraph(mesh, placement)
    return _Builder(nodes, owners, placement, plan, graph, multicast=not mesh.moves_in_groups).build()


class _Builder:
    """Writes the graph, from the forward of the first stage to its backward.

    `_values` and `_gradients` have nodes by stage and port. `_arrived` has the gradients that the producer of an edge
    has received, by port.
    """

    def __init__(
        self,
        stages: Sequence[StageNodes],
        owners: Mapping[str, PlannedParameter],
        placement: Sequence[int],
        plan: Callable[[Crossing], Reshard],
        graph: PipelineGraph,
        *,
        multicast: bool,
    ) -> None:
        self._stages, self._placement, self._plan, self._graph = stages, placement, plan, graph
        self._edges, self._tied = stage_edges(stages, multicast=multicast), tied_parameters(stages, owners, placement)
        self._tied_ports = {tied.port for tied in self._tied}
        self._values: dict[tuple[int, Port], fx.Node] = {}
        self._gradients: dict[tuple[int, Port], fx.Node] = {}
        self._arrived: defaultdict[Port, list[fx.Node]] = defaultdict(list)
        self._states: list[fx.Node] = []
        self._buffers: list[fx.Node] = []
        self._kept: dict[int, fx.Node] = {}
        self._own_gradients: dict[int, fx.Node] = {}

    def build(self) -> Pipeline:
        """The whole pipeline."""
        self._enter()
        for tied in self._tied:
            self._graph.turn_to(tied.owner)
            self._share(tied)
        for stage in self._stages:
            self._graph.turn_to(stage.index)
            self._forward(stage)
        for stage in reversed(self._stages):
            self._graph.turn_to(stage.index, backward=True)
            self._backward(stage)
        gradients = {each.port.name: total for each in self._tied if (total := self._sum_of(each)) is not None}
        gradients |= self._of_inputs()
        results = tuple(node for (_, port), node in self._values.items() if port.kind is PortKind.RESULT)
        own_gradients = tuple(gradients for _, gradients in sorted(self._own_gradients.items()))
        module = self._graph.finish((results, gradients, own_gradients, tuple(self._buffers)))
        return Pipeline(module, self._edges, tuple(self._graph.reshards))

    def _is_apart(self, port: Port) -> bool:
        """Whether the port is a value of its own in the graph; the other ports of a stage are in one dict."""
        return port.kind in (PortKind.INPUT, PortKind.EDGE) or port in self._tied_ports

    def _enter(self) -> None:
        for stage in self._stages:
            state = {port: tensor(node) for port, node in stage.inputs.items() if not self._is_apart(port)}
            self._states.append(self._graph.enter(f"state_{stage.index}", state))
        for tied in self._tied:
            stages = [stage for members in tied.together.values() for stage in members]
            like = next(tensor(n) for user in stages if (n := self._stages[user].inputs.get(tied.port)) is not None)
            self._values[tied.owner, tied.port] = self._graph.enter(tied.port.identifier, like)
        inputs: dict[Port, fx.Node] = {}
        for stage in self._stages:
            for port, node in stage.inputs.items():
                if port.kind is PortKind.INPUT:
                    inputs[port] = inputs.get(port) or self._graph.enter(port.identifier, tensor(node))
                    self._values[stage.index, port] = inputs[port]
        for port, node in self._stages[-1].tangents.items():
            self._arrived[port].append(self._graph.enter(_gradient(port), tensor(node)))

    def _forward(self, stage: StageNodes) -> None:
        index, layouts = stage.index, stage.planned.border.outputs
        apart = [port for port in stage.inputs if self._is_apart(port)]
        arguments = [self._states[index], *(self._values[index, port] for port in apart)]
        call = self._graph.call(f"stage_{index}", StageCall(stage.planned.joint, apart), arguments)
        given = [port for port in stage.outputs if port.kind is not PortKind.BUFFER]
        for position, port in enumerate(given):
            like = tensor(stage.outputs[port])
            self._values[index, port] = self._graph.tensor(call, position, port.identifier, like, layouts[port])
        if len(given) < len(stage.outputs):
            self._buffers.append(self._graph.item(call, len(given), f"buffers_{index}"))
        if stage.gradients:
            self._kept[index] = self._graph.item(call, -1, f"kept_{index}")
        for edge in self._edges:
            if edge.source == index:
                for crossing in value_crossings(edge, self._stages, self._placement):
                    self._move_value(crossing)

    def _share(self, tied: TiedParameter) -> None:
        """Move the parameter to all stages that use it."""
        if tied.users:
            self._move_value(tied_crossing(tied, self._stages, self._placement))
        for first, members in tied.together.items():
            self._values.update({(member, tied.port): self._values[first, tied.port] for member in members})

    def _move_value(self, crossing: Crossing) -> None:
        moved = self._graph.move(self._values[crossing.source, crossing.port], self._plan(crossing))
        self._values.update({(target, crossing.port): moved for target in crossing.targets})

    def _backward(self, stage: StageNodes) -> None:
        index, layouts = stage.index, stage.planned.border.gradients
        if stage.gradients:
            apart = [port for port in stage.gradients if self._is_apart(port)]
            tangents = [self._graph.total(self._arrived[port], _gradient(port)) for port in stage.tangents]
            backward = StageCall(stage.planned.joint, apart, is_backward=True)
            call = self._graph.call(f"backward_{index}", backward, [self._kept[index], *tangents])
            for position, port in enumerate(apart):
                name, like = _gradient(port, index), tensor(stage.gradients[port])
                self._gradients[index, port] = self._graph.tensor(call, position, name, like, layouts[port])
            self._own_gradients[index] = self._graph.item(call, len(apart), f"gradients_{index}")
        for edge in self._edges:
            if edge.differentiable and index in edge.targets:
                self._return(edge, index)

    def _return(self, edge: Edge, reader: int) -> None:
        """Move the gradient of an edge from one of its consumers to its producer."""
        port = Port(PortKind.EDGE, edge.name)
        gradient = self._gradients.get((reader, port))
        if gradient is None:
            gradient = self._graph.zeros_like(self._values[reader, port], _gradient(port, reader))
        reshard = self._plan(gradient_crossing(edge, reader, self._stages, self._placement))
        self._arrived[port].append(self._graph.move(gradient, reshard))

    def _sum_of(self, tied: TiedParameter) -> fx.Node | None:
        """The sum at the owner of all gradients of a tied parameter; None if there are none."""
        terms = self._gradients_at(tied, tied.owner)
        for user in tied.users:
            if there := self._gradients_at(tied, user):
                self._graph.turn_to(user, backward=True)
                total = self._graph.total(there, _gradient(tied.port, user))
                reshard = self._plan(tied_gradient_crossing(tied, user, self._stages, self._placement))
                terms.append(self._graph.move(total, reshard))
        self._graph.turn_to(tied.owner, backward=True)
        return self._graph.total(terms, _gradient(tied.port)) if terms else None

    def _of_inputs(self) -> dict[str, fx.Node]:
        """The sums of the gradients of inputs from all stages that read them."""
        terms: defaultdict[Port, list[fx.Node]] = defaultdict(list)
        for (_, port), gradient in self._gradients.items():
            if port.kind is PortKind.INPUT:
                terms[port].append(gradient)
        return {port.identifier: self._graph.total(found, _gradient(port)) for port, found in terms.items()}

    def _gradients_at(self, tied: TiedParameter, first: int) -> list[fx.Node]:
        """The gradients of the parameter from the stages that share it with stage `first`."""
        found = [self._gradients.get((member, tied.port)) for member in tied.together[first]]
        return [gradient for gradient in found if gradient is not None]


def _gradient(port: Port, stage: int | None = None) -> str:
    """The name of the gradient of `port`: of the term of `stage`, or of the whole."""
    return f"gradient_{'' if stage is None else f'{stage}_'}of_{port.identifier}"
