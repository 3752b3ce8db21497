"""Fuse the collectives of a rank's stages with matmuls; all ranks of a stage decide by the same costs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import TypeAlias

from torch import fx

from fxpar.costs.graph_time import GraphModel
from fxpar.graph.invariants import Form
from fxpar.ir.overlap_options import Fuse, Overlap
from fxpar.lowering.first_calls import call_fused_ops
from fxpar.pass_log import PassLog
from fxpar.passes.fuse_collectives import fuse_collectives
from fxpar.passes.fusion.fusion_costs import CostsByGraph, FusionCost, estimate_fusions, max_over_ranks
from fxpar.passes.fusion.verdicts import Verdict, VerdictTable
from fxpar.passes.stage_graphs import StageGraphs

GatherCosts: TypeAlias = Callable[[CostsByGraph], Iterable[CostsByGraph]]
"""Exchanges costs: takes this rank's, returns those of all ranks. A collective call."""


def fuse_stages(
    graphs: Sequence[StageGraphs],
    model: GraphModel,
    fuse: Fuse,
    overlap: Overlap,
    log: PassLog,
    *,
    gather_costs: GatherCosts | None = None,
    tries_fused_ops: bool = False,
) -> list[StageGraphs]:
    """The graphs of this rank's stages, with collectives fused where `fuse` and the estimates of `model` say so.

    Args:
        overlap: how collectives that are not fused will be overlapped.
        gather_costs: exchanges costs, so that all ranks decide by the same; by default this rank decides by its own.
        tries_fused_ops: whether every fused op is first called once, on made-up values. Collectives are not fused into
            an op that has no kernel faster than its parts one after another.
    """
    gather = gather_costs or (lambda own: [own])
    costs = max_over_ranks(gather(_estimated(graphs, model, overlap)))
    if tries_fused_ops:
        costs = max_over_ranks(gather(_tried(graphs, costs, fuse)))
    fused = [_fuse_stage(each, costs, fuse, log) for each in graphs]
    verdicts = {name: found for each in fused for name, found in each.verdicts.items()}
    if any(verdicts.values()):
        log.dump.text("fuse_collectives", VerdictTable(verdicts))
    return fused


def _estimated(graphs: Sequence[StageGraphs], model: GraphModel, overlap: Overlap) -> CostsByGraph:
    return {
        each.name(kind): estimate_fusions(module, model, overlap)
        for each in graphs
        for kind, module in (each.of_microbatch | each.of_step).items()
    }


def _tried(graphs: Sequence[StageGraphs], costs: CostsByGraph, fuse: Fuse) -> CostsByGraph:
    """The costs of this rank's stages after a first call of each of their fused ops."""
    tried: dict[str, list[FusionCost]] = {}
    for each in graphs:
        stage = _fuse_stage(each, costs, fuse, PassLog())
        unfused = {each.name(kind): call_fused_ops(module) for kind, module in stage.of_microbatch.items()}
        for name, of_graph in stage.verdicts.items():
            left = unfused.get(name, ())
            tried[name] = [verdict.cost.tried(runs_unfused=verdict.fused in left) for verdict in of_graph]
    return tried


def _fuse_stage(graphs: StageGraphs, costs: CostsByGraph, fuse: Fuse, log: PassLog) -> StageGraphs:
    """The stage with fused ops, and with the verdicts on all collectives of each graph."""
    fused: dict[str, fx.GraphModule] = {}
    verdicts: dict[str, Sequence[Verdict]] = {}
    for kind, module in (graphs.of_microbatch | graphs.of_step).items():
        found = fuse_collectives(module, costs[graphs.name(kind)], fuse)
        verdicts[graphs.name(kind)] = found.verdicts
        if kind in graphs.of_microbatch:
            fused[kind] = found.module
        has_fused = any(verdict.fused is not None for verdict in found.verdicts)
        form = Form.LOCAL if kind in graphs.of_microbatch else Form.STARTING
        log.graph(f"fuse_collectives_{kind}", found.module, form, graphs.index, shows=has_fused)
        log.collectives("fuse_collectives", [module], [found.module], graphs.index)
    return replace(graphs.with_microbatch(fused), verdicts=verdicts)
