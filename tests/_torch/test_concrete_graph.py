"""Graphs that make nodes without looking for symbolic numbers."""

from __future__ import annotations

import torch
from torch import fx

from fxpar._torch.concrete_graph import ConcreteGraph

aten = torch.ops.aten


def written(graph: fx.Graph) -> fx.Graph:
    """`graph` with a few calls."""
    given = graph.placeholder("given")
    both = graph.call_function(aten.stack.default, ([given, given],), {"dim": 0})
    graph.output((graph.call_function(aten.relu.default, (both,)), given))
    return graph


def test_a_graph_is_the_same_as_one_of_fx() -> None:
    found, expected = written(ConcreteGraph()), written(fx.Graph())
    found.lint()
    assert found.python_code("self").src == expected.python_code("self").src
    for mine, other in zip(found.nodes, expected.nodes, strict=True):
        assert str((mine.args, mine.kwargs, list(mine.users), mine.all_input_nodes)) == str(
            (other.args, other.kwargs, list(other.users), other.all_input_nodes)
        )
    given = torch.tensor([-1.0, 1.0])
    assert torch.equal(fx.GraphModule({}, found)(given)[0], torch.tensor([[0.0, 1.0], [0.0, 1.0]]))
