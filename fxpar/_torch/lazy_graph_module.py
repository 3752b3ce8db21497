"""Graphs that PyTorch writes no Python code for until they are to run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import fx, nn
from torch.fx._lazy_graph_module import _LazyGraphModule


def lazy_graph_module(root: nn.Module | dict[str, Any], graph: fx.Graph) -> fx.GraphModule:
    """As fx.GraphModule, whose constructor takes longer than many a pass, since it writes and compiles Python code.

    For graphs between passes. Those that are to run often do so by their `code_of`, since `forward` looks for the code
    in every call.
    """
    return _LazyGraphModule(root, graph)


def code_of(graph: fx.GraphModule) -> Callable[..., Any]:
    """The Python code of a graph, which is written now if it was not."""
    _LazyGraphModule.force_recompile(graph)
    return graph.forward
