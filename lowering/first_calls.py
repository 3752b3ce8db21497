"""Call fused ops before the first step: what their first calls do must not happen in the midst of one."""

from __future__ import annotations

from torch import fx

from fxpar.ir.fused_ops import unfused_calls
from fxpar.ir.node_meta import fused, tensor
from fxpar.ir.strides import unfilled_like


def call_fused_ops(graph: fx.GraphModule) -> set[str]:
    """Call every fused op of `graph` on zeros, in order; a collective of the ranks that run this graph.

    In its first call a fused op sizes the memory that its ranks share, compiles its kernel and may time several ways to
    run it. For that, ranks wait for each other and for their devices; and a device on which a receive is posted, as
    over NCCL, waits for whoever sends, who may be waiting for this rank.

    Returns:
        The names of those that run as a collective and matmuls, one after another: that is faster, or they have no
        kernel for these values.
    """
    unfused = set[str]()
    for node in graph.graph.nodes:
        if fused(node) is not None:
            args, kwargs = fx.map_arg((node.args, node.kwargs), lambda each: unfilled_like(tensor(each)).zero_())
            node.target(*args, **kwargs)
            before = unfused_calls.count  # the first call may have timed both ways
            node.target(*args, **kwargs)
            if unfused_calls.count > before:
                unfused.add(node.name)
    return unfused
