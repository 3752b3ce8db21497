"""What all ranks would dump alike, the first one dumps; of its own stages, each rank does."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

import fxpar
from fxpar.analysis.dumped_step import read_dump
from fxpar.world.launch import run_ranks


class Net(nn.Module):
    """Two layers and a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).relu()
        return x.mean()


def dump_step(folder: Path) -> None:
    mesh = fxpar.init_mesh(pipe=2)
    torch.manual_seed(0)
    model, rows = Net(), torch.randn(4, 8)
    fxpar.distribute(model, mesh, stages=["layers.1"], microbatches=2, example_inputs=(rows,))
    torch.compile(model, backend="fxpar", options={"lowering": "aten", "dump": folder})(rows).backward()


def test_the_first_rank_dumps_for_all_and_makes_the_report(tmp_path: Path) -> None:
    run_ranks(2, dump_step, tmp_path, environment={"FXPAR_CHECK": "0"})
    passes = [
        {path.name.partition(".")[0].partition("_")[2] for path in (tmp_path / f"rank{rank}").iterdir()}
        for rank in range(2)
    ]
    logical = {
        "capture",
        "split_stages",
        "trace_joint",
        "logical_random",
        "decompose_for_sharding",
        "propagate_layouts",
    }
    assert passes[0] - passes[1] == logical | {"step_facts"}
    assert passes[1] - passes[0] == set()
    step = read_dump(tmp_path)
    assert list(step.stages) == [0, 1] and step.measured is None
    assert "</html>" in (tmp_path / "report.html").read_text(encoding="utf-8")
