"""Fuse collectives with adjacent matmuls, and record for every collective whether it was fused, and why."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch import fx

from fxpar.graph.extract import append_after_operands, copied, reordered
from fxpar.graph.view_users import Unfit
from fxpar.ir.node_meta import communication, module_path
from fxpar.ir.op_predicates import has_effect
from fxpar.ir.overlap_options import FUSE_ALWAYS, Fuse
from fxpar.passes.fusion.find_fusion import Fusion, find_fusion
from fxpar.passes.fusion.fusion_costs import FusionCost
from fxpar.passes.fusion.gather_matmul import GatherMatmul, write_gather_matmul
from fxpar.passes.fusion.matmul_reduce import write_matmul_reduce
from fxpar.passes.fusion.verdicts import Verdict
from fxpar.progress.phases import as_phase


@dataclass(frozen=True, slots=True)
class Fused:
    """A graph with fused ops, and a verdict on each collective that it had before, in order."""

    module: fx.GraphModule
    verdicts: tuple[Verdict, ...]


@as_phase
def fuse_collectives(module: fx.GraphModule, costs: Sequence[FusionCost], fuse: Fuse) -> Fused:
    """`module` with collectives and the matmuls before or after them replaced by fused ops.

    An all-gather is fused with all matmuls that take its result in the same form, a reduce-scatter or a sum all-reduce
    with the matmul that produces its terms. Ops that only rearrange a value may be in between; those that are still
    needed are applied around the fused op. Ops after an all-gather that can run on each rank's piece are moved before
    it (see `find_sunk_gather`). If the gathered value has other users, the fused op returns it as well.
    Values that are used elsewhere keep their strides. Ranks whose graphs differ only in sizes reach the same verdicts
    if the `costs` are the same.
    Source: Chang et al., "FLUX: Fast Software-based Communication Overlap on GPUs through Kernel Fusion".

    Args:
        costs: those of `estimate_fusions`, the same on all ranks that run a form of the graph.
        fuse: True: where it is estimated to cost no more than overlap; "always": where it is possible; False: nowhere.

    Before: `gathered = all_gather(x); wait = wait_tensor(gathered); mm = mm(wait, w)`
    After:  `both = all_gather_matmul(x, [w], [None], "rows", ...); mm = both[0]`
    """
    graph = copied(module.graph.nodes)
    starts = [node for node in graph.nodes if communication(node) is not None]
    verdicts = tuple(_decide(start, cost, fuse) for start, cost in zip(starts, costs, strict=True))
    if all(verdict.fused is None for verdict in verdicts):
        return Fused(module, verdicts)
    for node in reversed(graph.nodes):
        if not node.users and node.op == "call_function" and not has_effect(node):
            graph.erase_node(node)
    ordered: dict[fx.Node, None] = {}
    for node in graph.nodes:
        append_after_operands(node, ordered)
    return Fused(reordered(module, ordered), verdicts)


def _decide(start: fx.Node, cost: FusionCost, fuse: Fuse) -> Verdict:
    """Fuse the collective at `start` if it is possible and `cost` and `fuse` say so."""
    done, found = communication(start), find_fusion(start)
    assert done is not None, f"{start} is no collective"
    is_cheaper = fuse == FUSE_ALWAYS or (fuse and cost.fused_us <= cost.apart_us)
    if isinstance(found, Unfit) or not is_cheaper or math.isinf(cost.fused_us):
        return Verdict(start.name, done, module_path(start), None, (), _why_left(found, cost, fuse), cost)
    matmuls = tuple(node.name for node in found.matmuls)
    reason = "wherever it can be" if fuse == FUSE_ALWAYS else "estimated to be cheaper"
    if isinstance(found, GatherMatmul) and found.before is not None:
        reason += f", behind {', '.join(node.name for node in found.before.ops)} on every rank's piece"
    return Verdict(start.name, done, module_path(start), _write(found).name, matmuls, reason, cost)


def _why_left(found: Fusion | Unfit, cost: FusionCost, fuse: Fuse) -> str:
    if isinstance(found, Unfit):
        return found.reason
    if cost.runs_unfused:
        return "as one op it ran one after the other here: faster so, or for want of a kernel"
    if math.isinf(cost.fused_us):
        return "the graphs of other ranks differ here"
    matmuls = ", ".join(node.name for node in found.matmuls)
    return f"beside other computation it is cheaper than with {matmuls}" if fuse else f"could be fused with {matmuls}"


def _write(found: Fusion) -> fx.Node:
    return write_gather_matmul(found) if isinstance(found, GatherMatmul) else write_matmul_reduce(found)
