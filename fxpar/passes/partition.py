"""Cut a joint graph into its forward and its backward, so that little has to be kept in between."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any

import networkx as nx
import torch
from torch import Tensor, fx

from fxpar._torch import c10d_functional
from fxpar.annotate import Placed, is_backward, layout_of, move, set_origin, set_placed, set_value, tensor, value
from fxpar.stage import JointGraph, PortKind
from fxpar.strides import is_dense

aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class Partitioned:
    """`forward(*inputs)` gives the outputs, then `num_saved` values; `backward(*saved, *tangents)` gives the gradients.

    Inputs that the backward needs are among the saved values as they are: they must not change in between. There is no
    backward if there are no gradients.
    """

    forward: fx.GraphModule
    backward: fx.GraphModule | None
    num_saved: int


def partition(joint: JointGraph) -> Partitioned:
    """Split `joint` by what depends on what.

    The forward is all that its outputs need. What the backward needs besides is split where the fewest bytes cross: a
    minimum cut. Parameters cross for free. Views are taken again in the backward rather than saved, and nothing else is
    done twice.

    Before: `mm = aten.mm(x, w); relu = aten.relu(mm); mask = aten.gt(relu, 0); dm = aten.mul(tangent, mask)`
    After:  forward `mm`, `relu`, `mask`, saving `mask`; backward `dm = aten.mul(tangent, mask)`
    """
    borders = _Borders.of(joint)
    nodes = list(joint.module.graph.nodes)
    if not borders.gradients:
        return Partitioned(_extract(joint, nodes, borders.inputs, borders.outputs, borders.effects_before), None, 0)
    saved = _choose_saved(joint, borders)
    early = _with_layers(nodes)
    forward = _extract(joint, early, borders.inputs, [*borders.outputs, *saved], borders.effects_before)
    backward = _extract(joint, nodes, [*saved, *borders.tangents], borders.gradients, borders.effects_after)
    again = {node.name for node in backward.graph.nodes if node.op == "call_function" and not may_run_twice(node)}
    twice = again.intersection(node.name for node in forward.graph.nodes)
    assert not twice, f"{twice} would run in the forward and in the backward"
    _copy_parts(forward, len(borders.outputs))
    return Partitioned(forward, backward, len(saved))


@dataclass(frozen=True, slots=True)
class _Borders:
    """The nodes at the border of a joint graph, and those inside that do more than give a value."""

    inputs: list[fx.Node]
    tangents: list[fx.Node]
    outputs: list[fx.Node]
    gradients: list[fx.Node]
    effects_before: list[fx.Node]
    effects_after: list[fx.Node]

    @staticmethod
    def of(joint: JointGraph) -> _Borders:
        graph = joint.module.graph
        placeholders = graph.find_nodes(op="placeholder")
        (output,) = graph.find_nodes(op="output")
        inputs, tangents = placeholders[: len(joint.inputs)], placeholders[len(joint.inputs) :]
        returned = output.args[0]
        after = _closure(tangents, _users)
        effects = [node for node in graph.nodes if _has_effect(node)]
        return _Borders(
            inputs,
            tangents,
            list(returned[: len(joint.outputs)]),
            list(returned[len(joint.outputs) :]),
            [node for node in effects if node not in after],
            [node for node in effects if node in after],
        )


def _choose_saved(joint: JointGraph, borders: _Borders) -> list[fx.Node]:
    """The values that the forward hands to the backward: a minimum cut between what must run before and after.

    Every value v is an edge from (v, "made") to (v, "kept") whose capacity is the memory that keeping v takes. What
    lies on the forward's side of the cut is made in the forward.
    """
    before = _closure([*borders.outputs, *borders.effects_before], _operands) | {*borders.inputs}
    after = _closure(borders.tangents, _users)
    wanted = _closure([*borders.gradients, *borders.effects_after], _operands)
    undecided = [node for node in joint.module.graph.nodes if node in wanted - after]
    leaving = {*borders.gradients, *(operand for node in wanted & after for operand in node.all_input_nodes)}
    free = _free_to_keep(joint, borders)

    network: nx.DiGraph[Any] = nx.DiGraph()
    network.add_nodes_from(("forward", "backward"))
    for node in undecided:
        # Of equal cuts, take the one that saves a value rather than a view of it.
        capacity = _capacity(node, free) * len(undecided) + may_run_twice(node)
        network.add_edge((node, "made"), (node, "kept"), capacity=capacity)
        if node in before and not may_run_twice(node):
            network.add_edge("forward", (node, "made"))
        if node in leaving:
            network.add_edge((node, "kept"), "backward")
        for operand in node.all_input_nodes:
            network.add_edge((operand, "kept"), (node, "made"))
            if not may_run_twice(operand):
                network.add_edge((node, "made"), (operand, "made"))
    _, (in_forward, _) = nx.minimum_cut(network, "forward", "backward")
    return [node for node in undecided if (node, "made") in in_forward and (node, "kept") not in in_forward]


def _capacity(node: fx.Node, free: AbstractSet[fx.Node]) -> float:
    """The memory that keeping `node` takes, in bytes."""
    if not isinstance(value(node), Tensor) or move(node) is not None:
        return math.inf  # nobody can keep a tuple, or what a collective has not written yet
    return 0 if node in free else _kept_bytes(node)


def _operands(node: fx.Node) -> Iterable[fx.Node]:
    return node.all_input_nodes


def _users(node: fx.Node) -> Iterable[fx.Node]:
    return node.users


def _closure(start: Iterable[fx.Node], following: Callable[[fx.Node], Iterable[fx.Node]]) -> set[fx.Node]:
    """The nodes of `start` and all that follow from them."""
    found, pending = set[fx.Node](), list(start)
    while pending:
        node = pending.pop()
        if node not in found and node.op != "output":
            found.add(node)
            pending.extend(following(node))
    return found


def _has_effect(node: fx.Node) -> bool:
    """Whether `node` does more than give a value. Waiting for a collective does not."""
    is_wait = node.target is c10d_functional.wait_tensor.default
    return node.op == "call_function" and not is_wait and node.is_impure(impure_random=False)


def may_run_twice(node: fx.Node) -> bool:
    """Whether `node` costs nothing and gives the same again: a view, a constant, an item of a tuple."""
    if node.op == "get_attr" or node.target is operator.getitem:
        return True
    if not isinstance(node.target, torch._ops.OpOverload) or torch.Tag.nondeterministic_seeded in node.target.tags:
        return False
    return node.target.is_view or node.target is aten._unsafe_view.default or not node.all_input_nodes


def _free_to_keep(joint: JointGraph, borders: _Borders) -> set[fx.Node]:
    """Parameters and buffers are there anyhow. (Autograd refuses to use a buffer that the forward has changed.)"""
    stays = {PortKind.PARAMETER, PortKind.BUFFER}
    return {node for node, port in zip(borders.inputs, joint.inputs, strict=True) if port.kind in stays}


def _kept_bytes(node: fx.Node) -> int:
    """The memory that `node` takes until the backward. A dense part of something larger is kept as a copy."""
    kept = tensor(node)
    return kept.nbytes if is_dense(kept) else kept.untyped_storage().nbytes()


def _with_layers(nodes: Sequence[fx.Node]) -> list[fx.Node]:
    """The nodes, what autograd put into the backward right behind its operands: within its layer, if it runs before."""
    places: dict[fx.Node, int] = {}
    for index, node in enumerate(nodes):
        operands = [places[operand] for operand in node.all_input_nodes]
        places[node] = max(operands) if is_backward(node) and operands else index
    return sorted(nodes, key=places.__getitem__)


def _extract(
    joint: JointGraph,
    nodes: Sequence[fx.Node],
    inputs: Sequence[fx.Node],
    outputs: Sequence[fx.Node],
    effects: Sequence[fx.Node],
) -> fx.GraphModule:
    """The part of the joint graph that leads from `inputs` to `outputs` and to `effects`, in the order of `nodes`."""
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in inputs:
        copies[node] = graph.node_copy(node) if node.op == "placeholder" else _enter(graph, node)
    needed = _closure([*outputs, *effects], lambda node: () if node in copies else node.all_input_nodes)
    for node in nodes:
        if node in needed and node not in copies:
            copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(tuple(copies[node] for node in outputs))
    return fx.GraphModule(joint.module, graph)


def _enter(graph: fx.Graph, saved: fx.Node) -> fx.Node:
    """The input at which a value that the forward saved enters the backward."""
    node = graph.placeholder(saved.name)
    set_value(node, value(saved))
    set_origin(node, saved, backward=is_backward(saved))
    set_placed(node, Placed((), (layout_of(saved),)))
    return node


def _copy_parts(forward: fx.GraphModule, num_outputs: int) -> None:
    """Save parts of larger values as copies, so that the rest can be freed."""
    (output,) = forward.graph.find_nodes(op="output")
    placeholders = forward.graph.find_nodes(op="placeholder")
    returned = list(output.args[0])
    for position, node in enumerate(returned[num_outputs:], start=num_outputs):
        if _is_dense_part(tensor(node)):
            # At once, so that the copy belongs to its layer, and what it is a part of is freed there.
            with forward.graph.inserting_after(placeholders[-1] if node in placeholders else node):
                returned[position] = forward.graph.call_function(aten.clone.default, (node,))
            set_origin(returned[position], node, backward=False)
            set_value(returned[position], tensor(node))
    output.args = (tuple(returned),)
    forward.recompile()


def _is_dense_part(kept: Tensor) -> bool:
    return is_dense(kept) and kept.untyped_storage().nbytes() > kept.nbytes
