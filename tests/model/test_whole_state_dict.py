"""One file has all of a distributed model, and a warning tells where one would have a part alone."""

from __future__ import annotations

import copy
import io
import math
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn

import fxpar
from fxpar.errors import PlainModelError
from fxpar.world.launch import run_ranks
from tests.support.one_process import ATEN
from tests.support.parity import batch_shard


class Tied(nn.Module):
    """A weight that both stages use, and a buffer that changes in each."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8)
        self.last.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        loss: Tensor = self.last(self.norm(self.first(x))).square().mean()
        return loss


def save_whole(sizes: dict[str, int], folder: Path) -> tuple[list[str], list[str], list[str]]:
    """Save in one file after a step; the names that this rank got, and what was warned of by then and later."""
    mesh = fxpar.init_mesh(**sizes)
    torch.manual_seed(0)
    model, part = Tied(), batch_shard({"x": torch.randn(8, 8)}, mesh)
    fxpar.distribute(model, mesh, stages=["norm"][: mesh.pipe - 1], example_inputs=part)
    step = torch.compile(model, backend="fxpar", options=ATEN)
    step(**part).backward()
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        state = fxpar.whole_state_dict(step)
        if mesh.rank == 0:
            torch.save(state, folder / "model.pt")
        dcp.save({"model": model.state_dict()}, checkpoint_id=folder / "shards")
        copy.deepcopy(model.state_dict())
        early = [str(each.message) for each in warned if "torch.save" in str(each.message)]
        for _ in range(2):
            torch.save({"model": model.state_dict()}, io.BytesIO())
    late = [str(each.message) for each in warned if "torch.save" in str(each.message)]
    return list(state), early, late


@pytest.mark.parametrize("sizes", [{"pipe": 2}, {"z": 2}, {"x": 2}], ids=str)
def test_one_file_has_all_and_a_part_is_warned_of(sizes: dict[str, int], tmp_path: Path) -> None:
    found = run_ranks(math.prod(sizes.values()), save_whole, sizes, tmp_path)
    torch.manual_seed(0)
    alone, loaded = Tied(), Tied()
    assert [set(names) for names, _, _ in found] == [set(alone.state_dict()), set()]
    loaded.load_state_dict(torch.load(tmp_path / "model.pt"))
    torch.testing.assert_close(dict(loaded.named_parameters()), dict(alone.named_parameters()))
    assert loaded.norm.num_batches_tracked == 1
    for _, early, late in found:
        assert early == []
        assert len(late) == 1
        assert "the part that this rank has" in late[0] and "fxpar.whole_state_dict(model) on all ranks" in late[0]


def test_a_plain_model_is_an_error() -> None:
    with pytest.raises(PlainModelError, match=r"fxpar\.whole_state_dict expected"):
        fxpar.whole_state_dict(Tied())
