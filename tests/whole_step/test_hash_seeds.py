"""Ranks whose hash seeds differ, and which do the same for different batch shards, are given the same graphs."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import fxpar
from fxpar.world.launch import run_ranks
from tests.support.parity import BATCH, SUBJECTS, loss_of

SIZES = {"pipe": 2, "data": 2}


def dump_all(subject_name: str, folder: str) -> tuple[int, int]:
    """Compile a subject, and dump what every pass makes of it; the rank's place on the pipe axis and its rank."""
    mesh = fxpar.init_mesh(**SIZES)
    subject = SUBJECTS[subject_name]
    torch.manual_seed(0)
    model = copy.deepcopy(subject.build(mesh.pipe))
    batch = subject.make_batch(BATCH)
    stages = subject.boundaries(mesh.pipe)
    fxpar.distribute(model, mesh, stages=stages, microbatches=2, schedule="zb-h1", example_inputs=batch)
    step = torch.compile(model, backend="fxpar", options={"lowering": "aten", "dump": folder})
    loss_of(step(**batch)).backward()
    return mesh.coordinate["pipe"], mesh.rank


@pytest.mark.parametrize("subject", ["shared embedder", "unet"])
def test_graphs_do_not_depend_on_the_hash_seed(subject: str, tmp_path: Path) -> None:
    ranks = run_ranks(4, dump_all, subject, str(tmp_path))
    for pipe in range(SIZES["pipe"]):
        first, second = (tmp_path / f"rank{rank}" for place, rank in ranks if place == pipe)
        names = sorted(path.name for path in first.iterdir() if "step_facts" not in path.name)  # of the first rank
        assert names == sorted(path.name for path in second.iterdir())
        assert any("split_backward" in name for name in names)
        differing = [name for name in names if (first / name).read_bytes() != (second / name).read_bytes()]
        assert not differing


class OfSets(nn.Module):
    """Has a layer for each of some kinds, in the order of a set, and calls them in the order of another."""

    def __init__(self) -> None:
        super().__init__()
        self.kinds = {"full", "sliding", "linear", "global", "chunked"}
        self.layers = nn.ModuleDict({kind: nn.Linear(4, 4) for kind in sorted(self.kinds)})
        for kind in self.kinds:
            self.register_buffer(f"scale_of_{kind}", torch.tensor(float(len(kind))))

    def forward(self, x: Tensor) -> Tensor:
        for kind in self.kinds | {"last"}:
            x = x.relu() if kind == "last" else self.layers[kind](x) * getattr(self, f"scale_of_{kind}")
        return x.square().mean()


def order_and_loss() -> tuple[list[str], float]:
    """The order of this rank's set, and the loss of a step."""
    mesh = fxpar.init_mesh(x=2, data=2)
    torch.manual_seed(0)
    model, x = OfSets(), torch.randn(4, 4)
    fxpar.distribute(model, mesh, example_inputs=(x,))
    loss: Tensor = torch.compile(model, backend="fxpar", options={"lowering": "aten"})(x)
    loss.backward()
    return list(model.kinds), loss.item()


def test_what_is_done_with_the_items_of_a_set_is_done_in_one_order() -> None:
    found = run_ranks(4, order_and_loss, environment={"FXPAR_CACHE_DIR": ""})
    assert len({tuple(order) for order, _ in found}) > 1, "or this test shows nothing"
    assert len({loss for _, loss in found}) == 1
