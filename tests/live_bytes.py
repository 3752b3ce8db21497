"""How much memory the values of a graph take at once."""

from __future__ import annotations

from torch import Tensor, fx

from fxpar.annotate import move, value
from fxpar.passes.cut import kept_bytes
from fxpar.passes.kept_memory import owner_of


def peak_live_bytes(module: fx.GraphModule) -> int:
    """The most bytes that what a graph makes takes at once, with what collectives under way read.

    Values end with the last use of their memory; inputs, which others hold, do not count.
    """
    last_use: dict[fx.Node, int] = {}
    made: dict[fx.Node, int] = {}
    for index, node in enumerate(module.graph.nodes):
        made[node] = index
        for operand in node.all_input_nodes:
            last_use[owner_of(operand)] = index
            if move(owner_of(operand)) is not None:  # until it is waited on, a collective reads what it was given
                (given, *_) = owner_of(operand).all_input_nodes
                last_use[owner_of(given)] = index
    changes = [0] * (len(made) + 1)
    for owner, last in last_use.items():
        if owner.op == "call_function" and isinstance(value(owner), Tensor):
            changes[made[owner]] += kept_bytes(owner)
            changes[last + 1 if last + 1 < len(changes) else -1] -= kept_bytes(owner)
    live = peak = 0
    for change in changes:
        live += change
        peak = max(peak, live)
    return peak
