"""Call fused ops once before the first step, since their first calls synchronise ranks and devices."""

from __future__ import annotations

from torch import fx

from fxpar.ir.fused_ops import unfused_calls
from fxpar.ir.node_meta import fused, tensor
from fxpar.ir.strides import unfilled_like


def call_fused_ops(graph: fx.GraphModule) -> set[str]:
    """Call every fused op of `graph` on zeros, in order; a collective of the ranks that run this graph.

    In its first call a fused op allocates the memory that its ranks share, compiles its kernel and may time several
    variants of it. For that, ranks wait for each other and for their devices. Within a step this could deadlock: over
    NCCL, a device with a posted receive waits for the sender, which may be waiting for this rank.

    Returns:
        The names of the fused ops that run unfused, as a collective and matmuls one after the other, because that is
        faster or because there is no kernel for these values.
    """
    unfused = set[str]()
    for node in graph.graph.nodes:
        if fused(node) is not None:
            args, kwargs = fx.map_arg((node.args, node.kwargs), lambda each: unfilled_like(tensor(each)).zero_())
            node.target(*args, **kwargs)
            before = unfused_calls.count  # not before the first call, which may have timed the unfused variant, too
            node.target(*args, **kwargs)
            if unfused_calls.count > before:
                unfused.add(node.name)
    return unfused
