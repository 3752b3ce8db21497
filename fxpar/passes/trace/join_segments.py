"""Join the joint graphs of a stage's segments into that of the stage."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from typing import Any

from torch import fx

from fxpar._torch.compiler import rename_placeholder
from fxpar._torch.concrete_graph import ConcreteGraph
from fxpar._torch.lazy_graph_module import lazy_graph_module
from fxpar.graph.describe import describe
from fxpar.graph.extract import returned
from fxpar.ir.node_meta import is_backward, value
from fxpar.ir.stage import JointGraph, Port, PortKind, StageGraph
from fxpar.passes.trace.restamp import Restamp
from fxpar.passes.trace.segment import Segment


class UnfitCutError(Exception):
    """What one segment returns is not what the trace of its neighbour was made for."""

    def __init__(self, position: int) -> None:
        super().__init__(f"cut {position}")
        self.position = position


def join_segments(
    stage: StageGraph, parts: Sequence[Segment], traced: Sequence[tuple[Segment, JointGraph]]
) -> JointGraph:
    """The joint graph of `stage`: the forwards of its segments in order, then their backwards in reverse.

    Args:
        traced: for each segment, the first of its kind, and the joint graph of that.

    Raises:
        UnfitCutError: at a cut, values or gradients cross in another form than they were traced in.
    """
    joining = _Joining(stage, parts, traced)
    joining.forward()
    joining.backward()
    return joining.result()


class _Joining:
    """The graph as far as it is written.

    _values: nodes that have the values of the stage's nodes.
    _gradients: likewise the gradients, as far as later segments have computed them.
    """

    def __init__(
        self, stage: StageGraph, parts: Sequence[Segment], traced: Sequence[tuple[Segment, JointGraph]]
    ) -> None:
        self._stage, self._parts = stage, parts
        self._joints = [joint for _, joint in traced]
        self._stamps = [Restamp(first, part) for (first, _), part in zip(traced, parts, strict=True)]
        self._graph = ConcreteGraph()
        self._values: dict[fx.Node, fx.Node] = {}
        self._gradients: dict[fx.Node, fx.Node] = {}
        self._copies: list[dict[fx.Node, fx.Node]] = [{} for _ in parts]
        self._buffers: dict[Port, fx.Node] = {}
        self._constants: dict[str, Any] = {}
        self._sources = dict(zip(stage.module.graph.find_nodes(op="placeholder"), stage.inputs, strict=True))
        self._tangents: list[Port] = []
        self._enter()

    def _enter(self) -> None:
        """Placeholders of the stage's inputs, then of the gradients of its outputs."""
        like: dict[fx.Node, fx.Node] = {}
        for part, joint in zip(self._parts, self._joints, strict=True):
            given = joint.module.graph.find_nodes(op="placeholder")[: len(part.inputs)]
            for source, traced in zip(part.inputs, given, strict=True):
                like.setdefault(source, traced)
        for source, port in self._sources.items():
            self._values[source] = self._placeholder(port.identifier, like[source])
        last, joint = self._parts[-1], self._joints[-1]
        traced = joint.module.graph.find_nodes(op="placeholder")[len(last.inputs) :]
        for port, node in zip(joint.tangents, traced, strict=True):
            position = int(port.name)
            self._tangents.append(self._stage.outputs[position])
            name = f"gradient_of_{self._tangents[-1].identifier}"
            self._gradients[last.outputs[position]] = self._placeholder(name, node)

    def _placeholder(self, name: str, like: fx.Node) -> fx.Node:
        node = self._graph.placeholder("unnamed")
        rename_placeholder(node, name)
        node.meta = dict(like.meta)
        return node

    def forward(self) -> None:
        for index, (part, joint) in enumerate(zip(self._parts, self._joints, strict=True)):
            copies = self._copies[index]
            placeholders = joint.module.graph.find_nodes(op="placeholder")
            for source, traced in zip(part.inputs, placeholders, strict=False):
                self._check_form(index, self._values[source], traced)
                copies[traced] = self._values[source]
            self._copy(index, backward=False)
            for port, node in zip(joint.outputs, returned(joint.module), strict=False):
                if port.kind is PortKind.BUFFER:
                    self._change(index, part.inputs[int(port.name)], copies[node])
                elif int(port.name) < len(part.outputs):
                    self._values[part.outputs[int(port.name)]] = copies[node]

    def _change(self, index: int, buffer: fx.Node, changed: fx.Node) -> None:
        if any(buffer in part.inputs for number, part in enumerate(self._parts) if number != index):
            raise UnfitCutError(max(index - 1, 0))  # another segment would have to read the new value
        self._buffers[self._sources[buffer]] = changed

    def backward(self) -> None:
        for index in reversed(range(len(self._parts))):
            part, joint, copies = self._parts[index], self._joints[index], self._copies[index]
            leaving = (*part.outputs, *part.passed)
            placeholders = joint.module.graph.find_nodes(op="placeholder")[len(part.inputs) :]
            for port, traced in zip(joint.tangents, placeholders, strict=True):
                gradient = self._gradients.get(leaving[int(port.name)])
                if gradient is None:  # the trace was made for one
                    raise UnfitCutError(index)
                self._check_form(index + 1, gradient, traced)
                copies[traced] = gradient
            self._copy(index, backward=True)
            gradients = returned(joint.module)[len(joint.outputs) :]
            for port, node in zip(joint.gradients, gradients, strict=True):
                self._gradients[part.inputs[int(port.name)]] = copies[node]

    def _check_form(self, index: int, given: fx.Node, traced: fx.Node) -> None:
        """Compare a value that crosses the cut before segment `index` with the one that the trace was made with."""
        if describe(value(given)) != describe(value(traced)):
            raise UnfitCutError(min(max(index - 1, 0), len(self._parts) - 2))

    def _copy(self, index: int, *, backward: bool) -> None:
        """Copy the nodes of one direction of segment `index`."""
        copies, stamp, joint = self._copies[index], self._stamps[index], self._joints[index]
        backwards = _backward_nodes(joint)
        for node in joint.module.graph.nodes:
            if node.op in ("placeholder", "output") or (node in backwards) != backward:
                continue
            copies[node] = self._graph.node_copy(node, copies.__getitem__)
            copies[node].meta = stamp(node)
            if node.op == "get_attr":
                self._adopt(copies[node], getattr(joint.module, str(node.target)))

    def _adopt(self, node: fx.Node, constant: Any) -> None:
        """Let `node` read `constant` of a trace, under a name that no other trace has."""
        node.target = next(
            f"constant_{n}" for n in count() if self._constants.get(f"constant_{n}", constant) is constant
        )
        self._constants[node.target] = constant

    def result(self) -> JointGraph:
        """The joint graph, with the outputs in the order that `JointGraph` promises."""
        stage, sources = self._stage, self._sources
        buffers = {port: self._buffers[port] for port in stage.inputs if port in self._buffers}
        gradients = {port: self._gradients[node] for node, port in sources.items() if node in self._gradients}
        values = [self._values[node] for node in self._parts[-1].outputs]
        self._graph.output((*values, *buffers.values(), *gradients.values()))
        return JointGraph(
            stage.index,
            lazy_graph_module(self._constants, self._graph),
            stage.inputs,
            (*stage.outputs, *buffers),
            tuple(self._tangents),
            tuple(gradients),
        )


def _backward_nodes(joint: JointGraph) -> set[fx.Node]:
    """What autograd traced, and all that depends on it or on a gradient."""
    placeholders = joint.module.graph.find_nodes(op="placeholder")
    found = set(placeholders[len(joint.inputs) :])
    for node in joint.module.graph.nodes:
        if is_backward(node) or not found.isdisjoint(node.all_input_nodes):
            found.add(node)
    return found
