"""Recurrent layers of PyTorch, on meshes as on one process."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxpar
from fxpar.world.launch import run_ranks
from tests.support.one_process import ATEN, mesh_of_one_process
from tests.support.parity import batch_shard, compare

mesh = pytest.fixture(mesh_of_one_process)

KINDS: Mapping[str, Any] = {
    "lstm": lambda: nn.LSTM(6, 4, num_layers=2, bidirectional=True, batch_first=True),
    "projected lstm": lambda: nn.LSTM(6, 8, proj_size=4, batch_first=True),
    "gru": lambda: nn.GRU(6, 4, num_layers=2, batch_first=True),
    "rnn": lambda: nn.RNN(6, 4, nonlinearity="relu", bias=False),
}


class Tagger(nn.Module):
    """A recurrent layer between two others."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.first, self.recurrent = nn.Linear(3, 6), KINDS[kind]()
        self.last = nn.Linear(8 if kind == "lstm" else 4, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        if self.recurrent.batch_first:
            h, _ = self.recurrent(h)
        else:
            h = self.recurrent(h.transpose(0, 1))[0].transpose(0, 1)
        return (self.last(h) - x).square().mean()


def check_kinds(sizes: Mapping[str, int], kinds: Sequence[str]) -> None:
    """Two steps of each. For `run_ranks`."""
    mesh = fxpar.init_mesh(**sizes)
    for kind in kinds:
        torch.manual_seed(0)
        alone = Tagger(kind)
        model, whole = copy.deepcopy(alone), {"x": torch.randn(8, 3, 3)}
        part = batch_shard(whole, mesh)
        layouts = "search" if "x" in sizes else None
        stages = ["recurrent"][: mesh.pipe - 1]
        fxpar.distribute(model, mesh, stages=stages, layouts=layouts, microbatches=2, example_inputs=part)
        step = torch.compile(model, backend="fxpar", options=ATEN)
        for _ in range(2):
            expected, found = alone(**whole), step(**part)
            expected.backward()
            found.backward()
            compare(f"{kind} on {sizes}", expected, found, alone, model)
            with torch.no_grad():
                for parameter in (*alone.parameters(), *model.parameters()):
                    parameter.mul_(0.9)


@pytest.mark.parametrize(
    ("sizes", "kinds"),
    [({"pipe": 2}, [*KINDS]), ({"z": 2}, [*KINDS]), ({"x": 2}, ["gru"])],  # layouts of long chains are slow to find
    ids=str,
)
def test_recurrent_layers_equal_one_process(sizes: dict[str, int], kinds: Sequence[str]) -> None:
    run_ranks(math.prod(sizes.values()), check_kinds, sizes, kinds)


def test_a_recurrent_layer_is_copied_moved_and_saved_as_before(mesh: fxpar.Mesh) -> None:
    model = fxpar.distribute(Tagger("lstm"), mesh)
    assert model.state_dict().keys() == Tagger("lstm").state_dict().keys()
    again: Any = copy.deepcopy(model).to("cpu")
    held = dict(again.recurrent.named_parameters())
    assert [id(each) for each in again.recurrent._flat_weights] == list(map(id, held.values()))
