"""Imported by the server that ranks are forked from: what each of them would set up first, it sets up once for all.

PyTorch's compiler makes tables and imports modules when it is first used; that takes as long as training a small model.
Nothing here may start a thread, which would not survive the fork.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

import fxpar
from fxpar.compiler import compile_stages, divide_stage, localize_stage, lower_stage, plan_stages
from fxpar.costs.graph_time import GraphModel
from fxpar.costs.prices import prices_of
from fxpar.ir.overlap_options import Overlap
from fxpar.ir.storage_options import Storage
from fxpar.ir.trace_forward import capture_forward
from fxpar.lowering import lower
from fxpar.model.distribution import distribution_of
from fxpar.schedule import build_schedule
from tests.lowering.graphs import traced
from tests.support.fake_mesh import fake_mesh
from tests.support.garbage import collect_garbage_seldom


class _Layer(nn.Module):
    """A little of all that models have."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(4, 4)
        self.norm = nn.LayerNorm(4)
        self.out = nn.Linear(4, 4)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """The loss."""
        x = self.tokens(tokens)
        x = x + nn.functional.scaled_dot_product_attention(x, x, x, is_causal=True)
        logits: Tensor = self.out(torch.relu(self.norm(x)))
        return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def _compile() -> None:
    batch = (torch.zeros(2, 3, dtype=torch.long),) * 2
    with fake_mesh() as mesh:
        model = fxpar.distribute(_Layer(), mesh, microbatches=2, example_inputs=batch)
        capture = capture_forward(model, "cpu", batch)
        distribution = distribution_of(capture.model)
        (stage,) = plan_stages(capture, distribution, ())
        schedule = build_schedule("1f1b", 1, 2)
        graphs = divide_stage(stage, localize_stage(stage, distribution), distribution, schedule, Storage(False, False))
        (graphs,) = compile_stages([graphs], GraphModel(mesh, prices_of(mesh)), False, Overlap())
        lower_stage(graphs.run, lower("aten"))
    lower("inductor")(traced(lambda x: [x + 1], torch.ones(3)))
    torch.compiler.reset()


_compile()
collect_garbage_seldom()
