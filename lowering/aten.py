"""The reference lowering: every ATen op runs as it stands."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor, fx


def lower_to_aten(graph: fx.GraphModule) -> Callable[..., Sequence[Tensor]]:
    """The graph's own Python code, which drops every intermediate value after its last use."""
    run: Callable[..., Sequence[Tensor]] = graph.forward
    return run
