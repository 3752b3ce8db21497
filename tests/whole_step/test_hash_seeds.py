"""Ranks whose hash seeds differ, and which do the same for different batch shards, are given the same graphs."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch

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
