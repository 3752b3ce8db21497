"""A model too large to allocate whole: nothing full-sized ever exists on a rank."""

from __future__ import annotations

import resource

import torch
import torch.distributed as dist
from torch import nn

import fxpar
from fxpar.compiler import compile_stages, divide_stage, localize_stage, lower_stage, plan_stages
from fxpar.costs.graph_time import GraphModel
from fxpar.costs.prices import prices_of
from fxpar.graph.graph_writer import fake_mode_of
from fxpar.ir.overlap_options import Overlap
from fxpar.ir.storage_options import Storage
from fxpar.ir.trace_forward import capture_forward
from fxpar.lowering import lower
from fxpar.model.distribution import distribution_of
from fxpar.schedule import build_schedule
from fxpar.world.launch import run_ranks
from tests.support.fake_mesh import fake_mesh
from tests.support.parity import GPT, SUBJECTS, Config

GIGABYTE = 2**30


def fill_with_zeros(module: nn.Module) -> None:
    for parameter in module.parameters(recurse=False):
        parameter.zero_()


def compile_one_rank_of_64() -> tuple[float, float, float]:
    """Gigabytes: of the logical weights, of the pieces that rank 0 holds, and of the memory taken for them."""
    dist.destroy_process_group()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with torch.device("meta"):
        model = GPT(Config(vocabulary=50257, context=512, layers=4, heads=96, hidden=12288))
    logical = sum(p.nbytes for p in model.parameters())
    batch = (torch.zeros(4, 512, dtype=torch.long, device="meta"),) * 2
    with fake_mesh(pipe=4, x=16) as mesh:
        fxpar.distribute(
            model,
            mesh,
            stages=[f"blocks.{layer}" for layer in (1, 2, 3)],
            layouts={**SUBJECTS["gpt"].hints, "tokens.weight": ("x", None), "head.weight": ("x", None)},
            microbatches=4,
            example_inputs=batch,
            init_weights=fill_with_zeros,
        )
        held = sum(p.to_local().nbytes for p in model.parameters())
        capture = capture_forward(model, "cpu", batch)
        distribution = distribution_of(capture.model)
        stages = plan_stages(capture, distribution, distribution.final_plan.stages)
        schedule = build_schedule("eager-1f1b", 4, 4)
        local = localize_stage(stages[0], distribution)
        graphs = divide_stage(stages[0], local, distribution, schedule, Storage(False, False))
        (graphs,) = compile_stages([graphs], GraphModel(mesh, prices_of(mesh)), False, Overlap())
        stage = lower_stage(graphs.run, lower("aten"))
        assert stage.backward is not None
        with fake_mode_of(stages[0].joint.module.graph):
            made = stage.forward(*stage.input_pieces)
            gradients = stage.backward(*made[len(stage.outputs) :], *stage.tangent_pieces)
        pieces = dict(zip(stage.inputs, stage.input_pieces, strict=True))
        for port, gradient in zip(stage.gradients, gradients, strict=True):
            assert gradient.shape == pieces[port].shape, port
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return logical / GIGABYTE, held / GIGABYTE, (peak - before) * 1024 / GIGABYTE


def test_a_rank_holds_its_pieces_alone() -> None:
    ((logical, held, taken),) = run_ranks(1, compile_one_rank_of_64)
    assert logical > 30
    assert held < logical / 64 * 1.5, "rank 0 also holds a piece of the vocabulary, and the norms whole"
    assert taken < 1.0, f"the process grew by {taken:.1f} GB"
