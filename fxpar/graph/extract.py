"""Extract a part of a graph between given inputs and outputs; copy and reorder nodes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet

import torch
from torch import Tensor, fx

from fxpar._torch.concrete_graph import ConcreteGraph
from fxpar._torch.lazy_graph_module import lazy_graph_module
from fxpar.graph.min_cut import closure
from fxpar.ir.node_meta import Placed, is_backward, layout_of, set_origin, set_placed, set_value, tensor, value
from fxpar.ir.op_predicates import is_free_to_recompute
from fxpar.ir.strides import is_dense

aten = torch.ops.aten


def extract(
    module: fx.GraphModule,
    nodes: Sequence[fx.Node],
    inputs: Sequence[fx.Node],
    outputs: Sequence[fx.Node],
    effects: Sequence[fx.Node],
) -> fx.GraphModule:
    """The part of `module` that leads from `inputs` to `outputs` and to `effects`, in the order of `nodes`."""
    graph = ConcreteGraph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in inputs:
        copies[node] = graph.node_copy(node) if node.op == "placeholder" else _enter(graph, node)
    needed = closure([*outputs, *effects], lambda node: () if node in copies else node.all_input_nodes)
    for node in nodes:
        if node in needed and node not in copies:
            copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(tuple(copies[node] for node in outputs))
    return lazy_graph_module(module, graph)


def _enter(graph: fx.Graph, made: fx.Node) -> fx.Node:
    """A placeholder for the value `made` of an earlier part."""
    node = graph.placeholder(made.name)
    set_value(node, value(made))
    set_origin(node, made, backward=is_backward(made))
    set_placed(node, Placed((), (layout_of(made),)))
    return node


def copy_parts(early: fx.GraphModule, num_outputs: int) -> None:
    """Let `early` return, after the first outputs, copies of parts of larger storages, so that these can be freed."""
    placeholders = early.graph.find_nodes(op="placeholder")
    given = returned(early)
    for position, node in enumerate(given[num_outputs:], start=num_outputs):
        if _is_dense_part(tensor(node)):
            # Right after the node, so that the larger storage is freed within the same layer.
            with early.graph.inserting_after(placeholders[-1] if node in placeholders else node):
                given[position] = early.graph.call_function(aten.clone.default, (node,))
            set_origin(given[position], node, backward=is_backward(node))
            set_value(given[position], tensor(node).clone())
    early.graph.output_node().args = (tuple(given),)
    early.recompile()


def _is_dense_part(kept: Tensor) -> bool:
    return is_dense(kept) and kept.untyped_storage().nbytes() > kept.nbytes


def reordered(module: fx.GraphModule, nodes: Iterable[fx.Node]) -> fx.GraphModule:
    """A copy of `module` with its nodes in the order of `nodes`."""
    return lazy_graph_module(module, copied(nodes))


def copied(nodes: Iterable[fx.Node]) -> fx.Graph:
    """A graph of copies of all nodes of another one, in the order of `nodes`."""
    graph = ConcreteGraph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in nodes:
        copies[node] = graph.node_copy(node, copies.__getitem__)
    return graph


def append_after_operands(node: fx.Node, ordered: dict[fx.Node, None]) -> None:
    """Append `node` to `ordered`, after all nodes that it depends on and that are not there yet."""
    pending = [node]
    while pending:
        missing = [operand for operand in pending[-1].all_input_nodes if operand not in ordered]
        if missing:
            pending += reversed(missing)
        else:
            ordered[pending.pop()] = None


def returned(module: fx.GraphModule) -> list[fx.Node]:
    """The nodes that `module` returns, in order."""
    (output,) = module.graph.find_nodes(op="output")
    return list(output.args[0])


def check_nothing_runs_twice(*parts: fx.GraphModule, but: AbstractSet[str] = frozenset()) -> None:
    """Raise an AssertionError if an op that is not free to recompute, nor named in `but`, is in several of `parts`."""
    seen: set[str] = set()
    for part in parts:
        names = {
            node.name for node in part.graph.nodes if node.op == "call_function" and not is_free_to_recompute(node)
        }
        assert not names & seen - but, f"{sorted(names & seen - but)} would run in two parts of one graph"
        seen |= names
