"""Find the matmuls that a collective can be fused with."""

from __future__ import annotations

from typing import TypeAlias

from torch import fx

from fxpar.graph.view_users import Unfit
from fxpar.ir.node_meta import communication
from fxpar.passes.fusion.gather_matmul import GatherMatmul, find_gather_matmul
from fxpar.passes.fusion.matmul_reduce import MatmulReduce, find_matmul_reduce

Fusion: TypeAlias = GatherMatmul | MatmulReduce


def find_fusion(start: fx.Node) -> Fusion | Unfit:
    """What the collective at `start` can be fused with, as its graph is now."""
    done = communication(start)
    assert done is not None, f"{start} is no collective"
    match done.kind:
        case "all_gather":
            return find_gather_matmul(start)
        case "reduce_scatter" | "all_reduce":
            return find_matmul_reduce(start)
        case "all_to_all":
            return Unfit("no fused op has an all-to-all")
