"""The stages of a model for one GPU of a cluster, through all passes, in a process without any."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from unittest.mock import patch

import torch
from torch import fx, nn

from fxpar import compiler
from fxpar.compiler import compile_stages
from fxpar.costs.graph_time import GraphModel
from fxpar.costs.prices import prices_of
from fxpar.hardware.cluster import cluster_named
from fxpar.ir.overlap_options import Overlap
from fxpar.ir.stage import JointGraph, StageGraph
from fxpar.passes.trace_joint import Traced, trace_joint
from fxpar.planner.imagined_mesh import imagined_mesh, imagined_world
from fxpar.planner.step_model import StepModel
from tests.cuda.attention import Attention
from tests.cuda.pretend import without_device_guards
from tests.cuda.retarget import on_gpu


def graphs_on_gpu(
    model: nn.Module,
    batch: Mapping[str, Any],
    sizes: Mapping[str, int],
    microbatches: int,
    device: torch.device,
    attention: Attention,
) -> dict[str, fx.GraphModule]:
    """What runs for each microbatch, by stage and name, on the first rank of each stage, as if it had `device`.

    Collectives are fused wherever they can be, and all else is ordered to overlap.
    """

    def trace(stage: StageGraph, *, with_backward: bool, known: Traced | None = None) -> JointGraph:
        return on_gpu(trace_joint(stage, with_backward=with_backward, known=known), device, attention)

    cluster = cluster_named("dgx-a100")
    num_ranks = torch.Size(sizes.values()).numel()
    with imagined_world(num_ranks), patch.object(compiler, "trace_joint", trace), without_device_guards():
        mesh = imagined_mesh(sizes, cluster)
        step = StepModel(model, batch, mesh, microbatches)
        divided = step.divide("1f1b", step.memory_policies()[0])
        costs = GraphModel(mesh, prices_of(mesh))
        found: dict[str, fx.GraphModule] = {}
        for each in compile_stages(divided.graphs, costs, "always", Overlap()):
            found |= {each.name(kind): module for kind, module in each.of_microbatch.items()}
        return found
