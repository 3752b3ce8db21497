"""Call fused ops once before the first step: what their first calls do must not happen in the midst of one."""

from __future__ import annotations

from collections.abc import Iterable

from torch import fx

from fxpar.annotate import fused, tensor
from fxpar.strides import unfilled_like


def call_fused_ops(graphs: Iterable[fx.GraphModule]) -> None:
    """Call every fused op of `graphs` on zeros, in order; a collective of the ranks that run these graphs.

    In its first call a fused op sizes the memory that its ranks share, compiles its kernel and may time several ways to
    run it. For that, ranks wait for each other and for their devices; and a device on which a receive is posted, as
    over NCCL, waits for whoever sends, who may be waiting for this rank.
    """
    for graph in graphs:
        for node in graph.graph.nodes:
            if fused(node) is not None:
                args, kwargs = fx.map_arg((node.args, node.kwargs), lambda each: unfilled_like(tensor(each)).zero_())
                node.target(*args, **kwargs)
