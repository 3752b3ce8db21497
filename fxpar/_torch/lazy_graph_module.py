"""Graphs that PyTorch writes no Python code for until they run."""

from __future__ import annotations

from typing import Any

from torch import fx, nn
from torch.fx._lazy_graph_module import _LazyGraphModule


def lazy_graph_module(root: nn.Module | dict[str, Any], graph: fx.Graph) -> fx.GraphModule:
    """As fx.GraphModule, whose constructor takes longer than many a pass, since it writes and compiles Python code.

    For graphs between passes. `forward` looks for the code in every call, so one that runs often is an fx.GraphModule.
    """
    return _LazyGraphModule(root, graph)
