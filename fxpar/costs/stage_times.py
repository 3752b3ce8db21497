"""The times of stages' computations, estimated before anything is compiled, and gathered from all ranks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch.distributed as dist

from fxpar.costs.dataflow import Border, Operation, operations
from fxpar.costs.op_cost import work_us
from fxpar.costs.prices import Prices, prices_of
from fxpar.costs.transfer_costs import transfer_costs
from fxpar.graph.min_cut import closure, operands
from fxpar.ir.node_meta import is_backward
from fxpar.ir.stage import PlannedStage, PortKind
from fxpar.progress.phases import as_phase
from fxpar.resharding.pipeline import Pipeline
from fxpar.schedule import Costs, Kind
from fxpar.world.mesh import Mesh


@as_phase
def estimate_costs(stages: Sequence[PlannedStage], pipeline: Pipeline, mesh: Mesh, placement: Sequence[int]) -> Costs:
    """The costs of the stages' computations and of the transfers between them; the same on every rank."""
    prices = prices_of(mesh)
    times = {stage.joint.index: stage_times(stage, mesh.x * mesh.y, prices) for stage in stages}
    transfers = transfer_costs(pipeline.reshards, prices.network, prices.inside)
    return Costs(tuple(placement), pipeline.edges, times, transfers)


def gather_costs(own: Costs) -> Costs:
    """The costs of all stages, from every rank's `own`; a collective of all ranks.

    For ranks that share a stage, the longest times and the largest memory count.
    """
    parts = [own] * dist.get_world_size()
    dist.all_gather_object(parts, own)
    return Costs.merge(parts)


def stage_times(planned: PlannedStage, num_ranks: int, prices: Prices) -> dict[Kind, float]:
    """Microseconds of the forward, the backward and its two parts for one microbatch.

    All ops are assumed to be divided evenly among the `num_ranks` ranks that share a stage's matrices. I has the
    backward ops on which gradients of edges depend, W the others.
    """
    program = operations(planned.joint)
    edges = [op for op in program if op.border is Border.GRADIENT and op.port and op.port.kind is PortKind.EDGE]
    needed = closure([operand.node for op in edges for operand in op.operands], operands)
    backward = [op for op in program if op.call is not None and is_backward(op.node)]
    early = [op for op in backward if op.node in needed]
    forward = [op for op in program if op.call is not None and not is_backward(op.node)]

    def total(part: Iterable[Operation]) -> float:
        return sum(work_us(op, prices) for op in part) / num_ranks

    times: dict[Kind, float] = {"F": total(forward), "B": total(backward), "I": total(early)}
    return times | {"W": times["B"] - times["I"]}
