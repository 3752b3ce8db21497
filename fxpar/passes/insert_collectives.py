"""Turn the logical graph with layouts into the local graph: local shapes, and collectives where layouts change."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx

from fxpar._torch.lazy_graph_module import lazy_graph_module
from fxpar.graph.emit_redistribution import emit_step
from fxpar.graph.graph_writer import LocalGraph, fake_mode_of
from fxpar.graph.redistribute import RedistributeStep, plan_redistribution, traffic
from fxpar.ir.layout import REPLICATE, Layout, Partial
from fxpar.ir.node_meta import (
    CollectiveKind,
    Placed,
    communication,
    fused,
    is_backward,
    placed,
    set_placed,
    set_source,
    tensor,
    tensor_operands,
    value,
)
from fxpar.ir.stage import JointGraph
from fxpar.ir.strides import is_dense, stride_order
from fxpar.progress.phases import as_phase
from fxpar.rules import rule_for
from fxpar.rules.call import op_call
from fxpar.rules.rule import LocalOp
from fxpar.world.mesh import Mesh, num_batch_shards


@dataclass(frozen=True, slots=True)
class Collective:
    """A collective of a local graph: `num_bytes` is the local size of the larger of its operand and its result."""

    kind: CollectiveKind
    axis: str
    num_bytes: int
    node: fx.Node


def collectives(graph: fx.Graph) -> list[Collective]:
    """The collectives of a local graph, in order."""
    found = ((node, communication(node)) for node in graph.nodes)
    return [Collective(done.kind, done.axis, done.num_bytes, node) for node, done in found if done is not None]


def communicating(graph: fx.Graph) -> list[str]:
    """The communication of `graph` as text, in order: its collectives, and the ops that are fused with one."""
    found = []
    for node in graph.nodes:
        if (done := communication(node)) is not None:
            found.append(f"{done.kind} over {done.axis}")
        elif (within := fused(node)) is not None:
            found.append(f"{within.kind} over {within.axis}, fused with matmuls")
    return found


@as_phase
def insert_collectives(joint: JointGraph, mesh: Mesh) -> JointGraph:
    """The graph that this rank of `mesh` runs on its shards.

    Every tensor operand is redistributed from its layout to the one that its consumer needs, once for all consumers
    with the same need. Every op is emitted by its rule; ops without a rule run unchanged. Each collective is followed
    by its wait. Local values have the stride order of their logical values, and are dense where those are: ATen
    kernels that assume it would otherwise be silently wrong.

    A parameter that is stored in shards over z is gathered once, before its first use, for all its users. A gradient
    that leaves in shards over z is this rank's term of a sum, and is reduce-scattered.

    Before: `mm = aten.mm(a, b)` of [4, 2@x*4] and [2@x*4, 6], a partial sum over x; `relu = aten.relu(mm)` of [4, 6]
    After:  `mm = aten.mm(a, b)` of shapes [4, 4] and [4, 6]; `all_reduce = all_reduce(mm, ...)`;
            `wait_tensor = wait_tensor(all_reduce)`; `relu = aten.relu(wait_tensor)`
    """
    return _Localizer(joint, mesh).run()


class _Localizer:
    """The state of the pass: the local graph so far, and the layouts in which it has each logical value."""

    def __init__(self, joint: JointGraph, mesh: Mesh) -> None:
        self._joint = joint
        self._mesh = mesh
        self._local = LocalGraph(fake_mode_of(joint.module.graph))
        self._pieces: dict[fx.Node, dict[Layout, fx.Node]] = {}
        self._others: dict[fx.Node, fx.Node] = {}
        self._sums: dict[tuple[fx.Node, Layout], fx.Node] = {}
        self._alive = _alive(joint.module.graph)
        self._leaving = _leaving(joint)
        self._forward_needs = {need for node in self._alive for need in self._needs_of_forward(node)}
        self._needed_by_forward = {node for node, _ in self._forward_needs}

    def run(self) -> JointGraph:
        for node in self._alive:
            with self._local.on_behalf_of(node, backward=is_backward(node)):
                self._localize(node)
        self._local.graph.eliminate_dead_code()
        return replace(self._joint, module=lazy_graph_module(self._joint.module, self._local.graph))

    def _needs_of_forward(self, node: fx.Node) -> Iterator[tuple[fx.Node, Layout]]:
        if node.op in ("placeholder", "get_attr") or node.target is operator.getitem or is_backward(node):
            return
        needs = list(zip(tensor_operands(node), placed(node).inputs, strict=True))
        yield from needs[: len(self._joint.outputs)] if node.op == "output" else needs

    def _localize(self, node: fx.Node) -> None:
        match node.op:
            case "placeholder":
                self._note(node, self._placeholder(node))
            case "get_attr":
                constant = self._local.given(self._local.graph.get_attr(str(node.target)), value(node))
                self._note(node, constant, Layout(tuple(value(node).shape)))
            case "output":
                given = [None if leaving is None else self._left(leaving, node) for leaving in _exits(self._joint)]
                self._local.given(self._local.graph.output(tuple(given)), None)
            case _ if node.target is operator.getitem:
                source, index = node.args
                assert isinstance(source, fx.Node) and isinstance(index, int)
                result = self._local.call(operator.getitem, self._others[source], index)
                self._note(node, result, placed(source).outputs[index])
            case _ if node.target is torch.ops.fxpar.shard.default:  # the same value, in the layout of the hint
                (operand,), (need,) = tensor_operands(node), placed(node).inputs
                self._moved(operand, need, node)
                self._pieces[node] = self._pieces[operand]
                self._leave(node)
            case _ if node.target is torch.ops.fxpar.batch_mean.default:
                (operand,), (need,) = tensor_operands(node), placed(node).inputs
                self._pieces[node] = {need: self._batch_mean(self._moved(operand, need, node), operand, need)}
                self._leave(node)
            case _:
                self._note(node, self._call(node))

    def _batch_mean(self, piece: fx.Node, operand: fx.Node, layout: Layout) -> fx.Node:
        """The sum of `piece` over the batch axes, divided by the number of shards; `operand` is its logical value."""
        num_shards = num_batch_shards(self._mesh)
        if num_shards == 1:
            return piece
        for axis in self._mesh.batch_axes:
            step = RedistributeStep(axis, layout.with_placement(axis, Partial()), layout)
            piece = emit_step(self._local, piece, step, stride_order(tensor(operand)), self._mesh)
        mean = self._local.call(torch.ops.aten.div.Scalar, piece, num_shards)
        set_placed(mean, Placed((layout,), (layout,)))
        return mean

    def _placeholder(self, node: fx.Node) -> fx.Node:
        (layout,) = placed(node).outputs
        assert layout is not None, f"input {node} is no tensor"
        return self._local.placeholder(node.name, layout.local_shape(self._mesh.coordinate), tensor(node))

    def _call(self, node: fx.Node) -> fx.Node:
        """The local form of an op."""
        layouts, call, (args, kwargs) = placed(node), op_call(node), self._local_arguments(node)
        rule = rule_for(call.target)
        if rule is None:
            whole = [layout for layout in (*layouts.inputs, *layouts.outputs) if layout is not None and layout.axes]
            assert not whole, f"{node} ({call.target}) has no rule, but is placed as {layouts}"
            result = self._local.graph.call_function(call.target, args, kwargs)
        else:
            local = LocalOp(
                call, self._local.graph, args, kwargs, layouts.inputs, layouts.outputs, self._mesh.coordinate
            )
            result = rule.emit(local)
        self._local.complete()
        return result

    def _note(self, node: fx.Node, result: fx.Node, layout: Layout | None = None) -> None:
        """Record `result` as the local value of the logical `node` in `layout` (default: the one chosen for it)."""
        if not isinstance(value(node), Tensor):
            self._others[node] = result
            return
        if layout is None:
            (layout,) = placed(node).outputs
        assert layout is not None, f"{node} returns a tensor, but has no layout"
        if is_dense(tensor(node)):
            result = self._local.in_order(result, stride_order(tensor(node)))
        found, expected = tuple(tensor(result).shape), layout.local_shape(self._mesh.coordinate)
        assert found == expected, f"{node} ({node.target}), placed as {layout}, became {found} instead of {expected}"
        set_placed(result, Placed(placed(node).inputs, (layout,)))
        self._pieces[node] = {layout: result}
        self._leave(node)

    def _leave(self, node: fx.Node) -> None:
        """Emit the communication of a graph result right after it is computed: a collective should start early."""
        for leaving in self._leaving.get(node, ()):
            self._left(leaving, node)

    def _left(self, leaving: _Exit, consumer: fx.Node) -> fx.Node:
        """The local value of a graph result, in the layout in which it leaves."""
        operand, need = leaving.operand, leaving.layout
        whole = need.with_placement("z", REPLICATE)
        piece = self._moved(operand, whole, consumer)
        if not leaving.is_gradient or need == whole:
            return piece
        if (operand, need) not in self._sums:
            step = RedistributeStep("z", whole.with_placement("z", Partial()), need)
            with self._local.on_behalf_of(consumer, backward=True):
                scattered = emit_step(self._local, piece, step, stride_order(tensor(operand)), self._mesh)
            set_source(scattered, piece)
            self._sums[operand, need] = scattered
        return self._sums[operand, need]

    def _local_arguments(self, node: fx.Node) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of `node` with every value replaced by its local one, in the layout that `node` needs."""
        needs = iter(placed(node).inputs)

        def localized(operand: fx.Node) -> fx.Node:
            if isinstance(value(operand), Tensor):
                return self._moved(operand, next(needs), node)
            return self._others[operand]

        args, kwargs = fx.map_arg((node.args, node.kwargs), localized)
        return args, kwargs

    def _moved(self, operand: fx.Node, need: Layout, consumer: fx.Node) -> fx.Node:
        """The local value of `operand` in the layout `need`; if there is none yet, by the cheapest redistribution."""
        held = self._pieces[operand]
        whole = next(iter(held)).with_placement("z", REPLICATE)
        if whole not in held:  # a parameter in its storage layout
            backward = operand not in self._needed_by_forward
            (stored,) = held.values()
            self._move(operand, whole, consumer, backward=backward)
            set_source(held[whole], stored)
        if need not in held:
            backward = is_backward(operand) or (operand, need) not in self._forward_needs
            self._move(operand, need, consumer, backward=backward)
        return held[need]

    def _move(self, operand: fx.Node, need: Layout, consumer: fx.Node, *, backward: bool) -> None:
        held = self._pieces[operand]
        routes = [plan_redistribution(layout, need) for layout in held]
        route = min(routes, key=lambda steps: traffic(steps, self._mesh.sizes))
        with self._local.on_behalf_of(consumer, backward=backward):
            for step in route:
                order = stride_order(tensor(operand))
                held[step.after] = emit_step(self._local, held[step.before], step, order, self._mesh)


def _alive(graph: fx.Graph) -> list[fx.Node]:
    """The nodes that the outputs or an effect need."""
    alive: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        if node.is_impure() or any(user in alive for user in node.users):
            alive.add(node)
    return [node for node in graph.nodes if node in alive]


@dataclass(frozen=True, slots=True)
class _Exit:
    """A graph result and the layout in which it leaves; a gradient is this rank's term of a sum over z."""

    operand: fx.Node
    layout: Layout
    is_gradient: bool


def _exits(joint: JointGraph) -> list[_Exit | None]:
    """The results of the graph, in order; None for one that is not a node."""
    output = joint.module.graph.output_node()
    needs = iter(placed(output).inputs)
    (values,) = output.args
    assert isinstance(values, tuple | list), "a graph returns a sequence"
    return [
        _Exit(node, next(needs), place >= len(joint.outputs)) if isinstance(node, fx.Node) else None
        for place, node in enumerate(values)
    ]


def _leaving(joint: JointGraph) -> dict[fx.Node, list[_Exit]]:
    """The results of the graph, by the node that computes them."""
    leaving: dict[fx.Node, list[_Exit]] = {}
    for each in _exits(joint):
        if each is not None:
            leaving.setdefault(each.operand, []).append(each)
    return leaving
