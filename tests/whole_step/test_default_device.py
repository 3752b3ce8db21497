"""A script may set the default device of tensors: what fxpar makes has a device of its own."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from torch import Tensor, nn

import fxpar
from fxpar.world.launch import run_ranks
from tests.support.one_process import ATEN
from tests.support.parity import batch_shard

WIDTH = 8


class Drawing(nn.Module):
    """Dropout and running statistics, of which a step makes tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, WIDTH)
        self.layers = nn.Sequential(
            *(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Dropout(0.1)) for _ in range(4))
        )

    def forward(self, tokens: Tensor, scale: float) -> Tensor:
        return self.layers(self.embedding(tokens) * scale).square().mean()


def train(sizes: Mapping[str, int], default: str | None) -> list[float]:
    torch.manual_seed(0)
    model, tokens = Drawing(), torch.randint(16, (8,))
    try:
        torch.set_default_device(default)
        mesh = fxpar.init_mesh(pipe=sizes.get("pipe", 1), z=sizes.get("z", 1), x=sizes.get("x", 1), device_type="cpu")
        batch = {**batch_shard({"tokens": tokens}, mesh), "scale": 1.0}
        fxpar.distribute(model, mesh, microbatches=2, example_inputs=batch)
        step = torch.compile(model, backend="fxpar", options=ATEN)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        losses = []
        for number in range(3):
            loss = step(**{**batch, "scale": 1.0 + number})
            loss.backward()
            fxpar.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        model.eval()
        with torch.no_grad():
            losses.append(step(**batch).item())
        fxpar.whole_state_dict(model)
        return losses
    finally:
        torch.set_default_device(None)


@pytest.mark.parametrize("sizes", [{"pipe": 2}, {"z": 2}, {"x": 2}], ids=str)
def test_the_default_device_does_not_matter(sizes: dict[str, int]) -> None:
    """One without memory stands for another one."""
    (expected, *_), (found, *_) = (run_ranks(2, train, sizes, default) for default in (None, "meta"))
    assert found == expected
