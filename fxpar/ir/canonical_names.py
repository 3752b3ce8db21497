"""Names and an order of nodes that do not depend on how Dynamo came to a graph."""

from __future__ import annotations

from torch import fx

from fxpar._torch.concrete_graph import ConcreteGraph
from fxpar._torch.lazy_graph_module import lazy_graph_module
from fxpar.ir.node_meta import forget_module


def with_canonical_names(module: fx.GraphModule) -> fx.GraphModule:
    """The same graph with nodes that are named by their ops, in its order, and its placeholders sorted by name.

    Dynamo names some values by variables, and numbers names that it replaces later; copies of layers have neither.
    Whether a layer is traced or copied may differ from rank to rank, since a rank lacks the parameters of other stages;
    names, which tell ranks what crosses between stages, may not.

    Before: x, linear_2, linear_5, hidden_7 = add(...)
    After:  x, linear, linear_1, add
    """
    graph = ConcreteGraph()
    copies: dict[fx.Node, fx.Node] = {}
    placeholders = sorted(module.graph.find_nodes(op="placeholder"), key=lambda node: node.name)
    for node in (*placeholders, *(node for node in module.graph.nodes if node.op != "placeholder")):
        args, kwargs = fx.map_arg((node.args, node.kwargs), copies.__getitem__)
        name = node.name if node.op == "placeholder" else None
        copies[node] = graph.create_node(node.op, node.target, args, kwargs, name)
        copies[node].meta = dict(node.meta)
    for node in placeholders:
        forget_module(copies[node])
    return lazy_graph_module(module, graph)
