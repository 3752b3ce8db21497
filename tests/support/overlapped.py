"""Steps with collectives beside computation and without; runs on every rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

import fxpar
from fxpar.backend import fxpar as compile_by_fxpar
from tests.support.parity import BATCH, SUBJECTS, loss_of


def bits_under(sizes: Mapping[str, int], of_steps: Sequence[Mapping[str, Any]]) -> list[list[Tensor]]:
    """The loss and gradients of one batch of the GPT under several options, on this rank."""
    mesh = fxpar.init_mesh(**sizes)
    subject = SUBJECTS["gpt"]
    torch.manual_seed(0)
    model = subject.build(mesh.pipe)
    batch = subject.make_batch(BATCH)
    fxpar.distribute(model, mesh, layouts=subject.hints, microbatches=2, example_inputs=batch)
    found = []
    compiled: list[Any] = []

    def under_all(module: torch.fx.GraphModule, inputs: Sequence[Tensor]) -> Any:
        compiled.extend(compile_by_fxpar(module, inputs, options=options) for options in of_steps)
        return lambda *args: compiled[len(found)](*args)

    step = torch.compile(model, backend=under_all)
    while len(found) < len(of_steps):
        loss = loss_of(step(**batch))
        loss.backward()
        found.append([loss.detach(), *(cast(DTensor, p.grad).to_local() for p in model.parameters())])
        model.zero_grad()
    return found
