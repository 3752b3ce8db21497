"""Estimate what collectives cost when they overlap computation, and when they are fused with their matmuls."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from torch import fx

from fxpar.costs.graph_time import GraphModel
from fxpar.graph.view_users import Unfit
from fxpar.ir.node_meta import communication
from fxpar.ir.overlap_options import Overlap
from fxpar.passes.fusion.find_fusion import find_fusion
from fxpar.passes.fusion.gather_matmul import GatherMatmul
from fxpar.passes.overlap_collectives import overlapping_order


@dataclass(frozen=True, slots=True)
class FusionCost:
    """Estimated times of a collective, in microseconds.

    collective_us: of the collective alone.
    apart_us: of its matmuls, and of the wait for it that overlap leaves; of the wait alone if it cannot be fused.
    fused_us: of one op with its matmuls; infinite if it cannot be fused.
    way: how it would be fused. Ranks whose graphs differ in this cannot fuse it at all.
    runs_unfused: whether a call has shown that the op would run its parts one after another. `fused_us` is infinite
        then, since nothing would overlap them.
    """

    collective_us: float
    apart_us: float
    fused_us: float = math.inf
    fusion_key: str = ""
    runs_unfused: bool = False

    def tried(self, *, runs_unfused: bool) -> FusionCost:
        """The cost once it is known how the op runs."""
        return replace(self, fused_us=math.inf, runs_unfused=True) if runs_unfused else self

    def maximum(self, other: FusionCost) -> FusionCost:
        """The larger one of each figure."""
        return FusionCost(
            max(self.collective_us, other.collective_us),
            max(self.apart_us, other.apart_us),
            max(self.fused_us, other.fused_us) if self.fusion_key == other.fusion_key else math.inf,
            self.fusion_key if self.fusion_key == other.fusion_key else "",
            self.runs_unfused or other.runs_unfused,
        )


CostsByGraph: TypeAlias = Mapping[str, Sequence[FusionCost]]
"""By the name of a graph, which is the same on all ranks, the costs of its collectives in order."""


def estimate_fusions(module: fx.GraphModule, model: GraphModel, overlap: Overlap) -> list[FusionCost]:
    """The costs of the collectives of `module`, in order, where `overlap` says how they overlap computation."""
    waited = model.time_in_order(overlapping_order(module.graph, overlap)).waited_us
    return [
        _cost(node, model, waited.get(node.name, 0.0)) for node in module.graph.nodes if communication(node) is not None
    ]


def _cost(start: fx.Node, model: GraphModel, waited_us: float) -> FusionCost:
    done, found = communication(start), find_fusion(start)
    assert done is not None, f"{start} is no collective"
    collective_us = model.traffic(done).time_us
    if isinstance(found, Unfit):
        return FusionCost(collective_us, waited_us)
    matmul_us = sum(map(model.compute_us, found.matmuls))
    apart_us, fused_us = waited_us + matmul_us, model.fused_us(found.done, matmul_us)
    if isinstance(found, GatherMatmul) and found.before is not None:
        between_us = sum(map(model.compute_us, found.before.ops))
        apart_us, fused_us = apart_us + between_us, fused_us + between_us / found.before.rank.size
    return FusionCost(collective_us, apart_us, fused_us, found.fusion_key)


def max_over_ranks(of_ranks: Iterable[CostsByGraph]) -> dict[str, list[FusionCost]]:
    """The costs by which all ranks decide: maxima over those that run forms of one graph, whose sizes may differ."""
    found: dict[str, list[FusionCost]] = {}
    for of_rank in of_ranks:
        for name, costs in of_rank.items():
            before = found.get(name, costs)
            found[name] = [one.maximum(other) for one, other in zip(before, costs, strict=True)]
    return found
