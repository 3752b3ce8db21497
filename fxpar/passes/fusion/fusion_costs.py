"""What collectives cost beside other computation, and what they would cost as one op with the matmuls beside them."""

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
    """Estimated microseconds of a collective: alone, with its matmuls as far as it is waited for, one with them.

    Where there are no matmuls that it could be one op with, `fused_us` is infinite, and `apart_us` is of it alone. Ways
    to fuse it are told apart by `way`: ranks whose graphs differ there cannot fuse it at all. `runs_unfused` is known
    once the op has been called: `fused_us` is infinite then, since nothing else would run beside it.
    """

    collective_us: float
    apart_us: float
    fused_us: float = math.inf
    way: str = ""
    runs_unfused: bool = False

    def tried(self, *, runs_unfused: bool) -> FusionCost:
        """The cost once it is known how the op runs."""
        return replace(self, fused_us=math.inf, runs_unfused=True) if runs_unfused else self

    def maximum(self, other: FusionCost) -> FusionCost:
        """The larger of both figures each."""
        return FusionCost(
            max(self.collective_us, other.collective_us),
            max(self.apart_us, other.apart_us),
            max(self.fused_us, other.fused_us) if self.way == other.way else math.inf,
            self.way if self.way == other.way else "",
            self.runs_unfused or other.runs_unfused,
        )


CostsByGraph: TypeAlias = Mapping[str, Sequence[FusionCost]]
"""The costs of all collectives of graphs, in their order, by names that are the same for all ranks."""


def estimate_fusions(module: fx.GraphModule, model: GraphModel, overlap: Overlap) -> list[FusionCost]:
    """What every collective of `module` costs, in their order, if it runs beside computation as `overlap` says."""
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
    return FusionCost(collective_us, apart_us, fused_us, found.way)


def max_over_ranks(of_ranks: Iterable[CostsByGraph]) -> dict[str, list[FusionCost]]:
    """What all ranks decide by: the largest figures of those that run forms of one graph, whose sizes may differ."""
    found: dict[str, list[FusionCost]] = {}
    for of_rank in of_ranks:
        for name, costs in of_rank.items():
            before = found.get(name, costs)
            found[name] = [one.maximum(other) for one, other in zip(before, costs, strict=True)]
    return found
