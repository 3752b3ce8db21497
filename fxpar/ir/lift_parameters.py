"""Let the functions of control flow take as arguments the parameters that they read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import fx

from fxpar.ir.held_graphs import graphs_of
from fxpar.ir.markers import is_marker

_WITH_OPERANDS = ("cond", "while_loop", "scan", "associative_scan", "map_impl")
"""Ops all of whose functions take, at the end, the tensors that are listed in the op's last argument."""


def lift_parameters(module: fx.GraphModule) -> None:
    """Read each parameter before the op whose functions use it, so that it enters `module`, Dynamo's graph, itself.

    Before: `y = cond(flag, true, false, (x, stand_in))`, where true is `w = param(stand_in, ...); return (x @ w,)`
    After:  `w = param(stand_in, ...); y = cond(flag, true, false, (x, w))`, where true is `return (x @ w,)`
    """
    for node in list(module.graph.nodes):
        graphs = [*graphs_of(module, node).values()]
        for graph in graphs:
            lift_parameters(graph)
        if graphs and getattr(node.target, "__name__", None) in _WITH_OPERANDS:
            _lift(module, node, graphs)


def _lift(module: fx.GraphModule, call: fx.Node, graphs: Sequence[fx.GraphModule]) -> None:
    read = {_parameter(node): node for graph in graphs for node in graph.graph.nodes if is_marker(node, "param")}
    if not read:
        return
    given: Any = call.args[-1]
    with module.graph.inserting_before(call):
        outside = [module.graph.node_copy(node, {node.args[0]: given[_place(node)]}.get) for node in read.values()]
    operands = [*given, *outside]
    for graph in graphs:
        _take(graph, read)
    unread = [place for place in range(-len(operands), 0) if not any(_placeholders(g)[place].users for g in graphs)]
    for graph in graphs:
        for placeholder in [_placeholders(graph)[place] for place in unread]:
            graph.graph.erase_node(placeholder)
        graph.recompile()
    kept = [operand for place, operand in enumerate(operands, -len(operands)) if place not in unread]
    call.update_arg(len(call.args) - 1, tuple(kept))
    module.recompile()


def _parameter(marker: fx.Node) -> tuple[str, ...]:
    """What tells a parameter from others."""
    return tuple(map(str, marker.args[1:]))


def _place(marker: fx.Node) -> int:
    """Where what the marker reads is among the operands of the op."""
    placeholders = _placeholders(marker.graph.owning_module)
    return next(place for place, node in enumerate(placeholders) if node is marker.args[0]) - len(placeholders)


def _placeholders(graph: Any) -> list[fx.Node]:
    return [*graph.graph.find_nodes(op="placeholder")]


def _take(graph: fx.GraphModule, read: Mapping[tuple[str, ...], fx.Node]) -> None:
    """Give the graph a placeholder for each of the parameters, in the place of what it reads."""
    last, taken = _placeholders(graph)[-1], dict[tuple[str, ...], fx.Node]()
    for parameter, node in read.items():
        with graph.graph.inserting_after(last):
            taken[parameter] = last = graph.graph.placeholder(f"parameter_{len(taken)}")
        last.meta = dict(node.meta)
    for marker in [node for node in graph.graph.nodes if is_marker(node, "param")]:
        marker.replace_all_uses_with(taken[_parameter(marker)])
        graph.graph.erase_node(marker)
