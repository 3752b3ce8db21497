"""Train with statistics over all batch shards; what ranks of a test run."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

import fxpar


class Convolved(nn.Module):
    """Two normalised layers, one of which averages all batches that it has seen."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv1d(3, 4, 3), nn.BatchNorm1d(4)
        self.second, self.plain = nn.Conv1d(4, 4, 3), nn.BatchNorm1d(4, affine=False)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.norm(self.first(x)))
        return (self.plain(self.second(x)) - 1).pow(3).mean()


def compare_with_one_process(sizes: dict[str, int]) -> None:
    """Two steps of SyncBatchNorm on a mesh, then an evaluation, equal those of BatchNorm on the whole batch."""
    mesh = fxpar.init_mesh(**sizes)
    torch.manual_seed(0)
    alone = Convolved()
    model: Any = nn.SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(alone))
    whole = 3 + torch.randn(8, 3, 9)
    mine = whole.chunk(fxpar.num_batch_shards(mesh))[fxpar.batch_rank(mesh)]
    fxpar.distribute(model, mesh, example_inputs=(mine,))
    step = torch.compile(model, backend="fxpar", options={"lowering": "aten"})
    for _ in range(2):
        model.zero_grad()
        alone.zero_grad()
        found, expected = step(mine), alone(whole)
        torch.testing.assert_close(found, expected)
        found.backward()
        expected.backward()
    for name, parameter in alone.named_parameters():
        gradient = model.get_parameter(name).grad.full_tensor()
        torch.testing.assert_close(gradient, parameter.grad, msg=lambda text, name=name: f"{name}: {text}")
    for name, buffer in alone.named_buffers():
        torch.testing.assert_close(dict(model.named_buffers())[name], buffer, msg=lambda t, name=name: f"{name}: {t}")
    alone.eval()
    model.eval()
    with torch.no_grad():
        torch.testing.assert_close(step(mine), alone(whole))
